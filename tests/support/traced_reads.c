// Preloaded into a process: notes its positioned reads of one file, and can make them short or fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static long number(const char* name) {
  const char* value = getenv(name);
  return value != NULL ? atol(value) : 0;
}

static int traced(int fd) {
  const char* const wanted = getenv("READS_OF");
  char link[64], path[PATH_MAX];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  return wanted != NULL && length > 0 && (size_t)length == strlen(wanted) && memcmp(path, wanted, length) == 0;
}

static void note(size_t nbytes, off_t offset, int vectors) {
  char line[96];
  const int length = snprintf(line, sizeof(line), "%ld %zu %d\n", (long)offset, nbytes, vectors);
  const int log = open(getenv("READS_LOG"), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (write(log, line, length) != length) {
    abort();
  }
  close(log);
}

ssize_t preadv(int fd, const struct iovec* vectors, int count, off_t offset) {
  static ssize_t (*real)(int, const struct iovec*, int, off_t);
  if (real == NULL) {
    real = (ssize_t (*)(int, const struct iovec*, int, off_t))dlsym(RTLD_NEXT, "preadv");
  }
  if (!traced(fd)) {
    return real(fd, vectors, count, offset);
  }
  size_t nbytes = 0;
  for (int i = 0; i < count; ++i) {
    nbytes += vectors[i].iov_len;
  }
  note(nbytes, offset, count);
  const long error = number((fcntl(fd, F_GETFL) & O_DIRECT) != 0 ? "READS_DIRECT_ERROR" : "READS_ERROR");
  if (error != 0) {
    errno = (int)error;
    return -1;
  }
  const size_t most = (size_t)number("READS_MOST");
  if (most == 0 || nbytes <= most) {
    return real(fd, vectors, count, offset);
  }
  struct iovec* some = malloc(count * sizeof(*some));
  size_t left = most;
  int used = 0;
  for (; used < count && left > 0; ++used) {
    some[used] = vectors[used];
    if (some[used].iov_len > left) {
      some[used].iov_len = left;
    }
    left -= some[used].iov_len;
  }
  const ssize_t got = real(fd, some, used, offset);
  free(some);
  return got;
}

ssize_t pread(int fd, void* buffer, size_t nbytes, off_t offset) {
  static ssize_t (*real)(int, void*, size_t, off_t);
  if (real == NULL) {
    real = (ssize_t (*)(int, void*, size_t, off_t))dlsym(RTLD_NEXT, "pread");
  }
  const struct iovec whole = {buffer, nbytes};
  return traced(fd) ? preadv(fd, &whole, 1, offset) : real(fd, buffer, nbytes, offset);
}

ssize_t preadv64(int fd, const struct iovec* vectors, int count, off_t offset) {
  return preadv(fd, vectors, count, offset);
}

ssize_t pread64(int fd, void* buffer, size_t nbytes, off_t offset) {
  return pread(fd, buffer, nbytes, offset);
}

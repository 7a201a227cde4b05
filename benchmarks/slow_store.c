// Preloaded into a process: the files of one folder are on a store that takes a while for each request, whatever its size.
// Notes the bytes of each request in a log. For tests, positioned requests also fail or are short, if the environment says so
// when they are made: SLOW_ERROR and SLOW_DIRECT_ERROR are an errno, SLOW_MOST a number of bytes.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static const char *folder, *log_path;
static int log_file = -1;
static struct timespec delay;

__attribute__((constructor)) static void set_up(void) {
  folder = getenv("SLOW_FOLDER");
  log_path = getenv("SLOW_LOG");
  const char* const microseconds = getenv("SLOW_MICROSECONDS");
  const long us = microseconds != NULL ? atol(microseconds) : 0;
  delay.tv_sec = us / 1000000;
  delay.tv_nsec = us % 1000000 * 1000;
  if (folder != NULL && log_path != NULL) {
    log_file = open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  }
}

static int is_slow(int fd) {
  char link[64], path[PATH_MAX];
  if (folder == NULL) {
    return 0;
  }
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof(path) - 1);
  const size_t prefix = strlen(folder);
  return length > (ssize_t)prefix && memcmp(path, folder, prefix) == 0 && path[prefix] == '/';
}

static int charge(int fd, size_t nbytes) {
  if (!is_slow(fd)) {
    return 0;
  }
  const uint64_t noted = nbytes;
  if (log_file >= 0 && write(log_file, &noted, sizeof(noted)) != sizeof(noted)) {
    abort();
  }
  nanosleep(&delay, NULL);
  return 1;
}

static size_t setting(const char* name) {
  const char* const value = getenv(name);
  return value != NULL ? (size_t)atol(value) : 0;
}

static size_t total(const struct iovec* vectors, int count) {
  size_t nbytes = 0;
  for (int i = 0; i < count; ++i) {
    nbytes += vectors[i].iov_len;
  }
  return nbytes;
}

#define REAL(type, name)                         \
  static type real;                              \
  if (real == NULL) {                            \
    real = (type)dlsym(RTLD_NEXT, name);         \
  }

typedef ssize_t (*Read)(int, void*, size_t);
typedef ssize_t (*Readv)(int, const struct iovec*, int);
typedef ssize_t (*Preadv)(int, const struct iovec*, int, off_t);
typedef ssize_t (*Preadv2)(int, const struct iovec*, int, off_t, int);

ssize_t read(int fd, void* buffer, size_t nbytes) {
  REAL(Read, "read")
  charge(fd, nbytes);
  return real(fd, buffer, nbytes);
}

ssize_t readv(int fd, const struct iovec* vectors, int count) {
  REAL(Readv, "readv")
  charge(fd, total(vectors, count));
  return real(fd, vectors, count);
}

ssize_t preadv(int fd, const struct iovec* vectors, int count, off_t offset) {
  REAL(Preadv, "preadv")
  if (!charge(fd, total(vectors, count))) {
    return real(fd, vectors, count, offset);
  }
  const size_t error = setting((fcntl(fd, F_GETFL) & O_DIRECT) != 0 ? "SLOW_DIRECT_ERROR" : "SLOW_ERROR");
  if (error != 0) {
    errno = (int)error;
    return -1;
  }
  struct iovec some[count];
  size_t left = setting("SLOW_MOST");
  int used = 0;
  for (left = left != 0 ? left : SIZE_MAX; used < count && left > 0; left -= some[used++].iov_len) {
    some[used] = vectors[used];
    if (some[used].iov_len > left) {
      some[used].iov_len = left;
    }
  }
  return real(fd, some, used, offset);
}

ssize_t pread(int fd, void* buffer, size_t nbytes, off_t offset) {
  const struct iovec whole = {buffer, nbytes};
  return preadv(fd, &whole, 1, offset);
}

ssize_t preadv2(int fd, const struct iovec* vectors, int count, off_t offset, int flags) {
  REAL(Preadv2, "preadv2")
  charge(fd, total(vectors, count));
  return real(fd, vectors, count, offset, flags);
}

ssize_t pread64(int fd, void* buffer, size_t nbytes, off_t offset) {
  return pread(fd, buffer, nbytes, offset);
}

ssize_t preadv64(int fd, const struct iovec* vectors, int count, off_t offset) {
  return preadv(fd, vectors, count, offset);
}

ssize_t preadv64v2(int fd, const struct iovec* vectors, int count, off_t offset, int flags) {
  return preadv2(fd, vectors, count, offset, flags);
}

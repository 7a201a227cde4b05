// Libraries in the same folder as libepload, opened when they are first needed.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstdint>
#include <filesystem>
#include <string>

namespace epload {

// One of them, which a build may lack.
class SiblingLibrary {
 public:
  // `interface` names a function that returns the version of the library's interface. Throws c10::Error, with `rebuild`
  // at its end, when the library exists but does not load or has another interface.
  SiblingLibrary(const char* name, const char* interface, uint32_t expected, const char* rebuild) : rebuild_(rebuild) {
    static const char anchor = 0;
    Dl_info self{};
    TORCH_CHECK(dladdr(&anchor, &self) != 0, "epload: cannot find its own library");
    const auto path = std::filesystem::path(self.dli_fname).parent_path() / name;
    if (!std::filesystem::exists(path)) {
      return;
    }
    path_ = path.string();
    handle_ = dlopen(path_.c_str(), RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(handle_ != nullptr, "epload: ", path_, " does not load: ", dlerror(), rebuild_);
    uint32_t (*number)() = nullptr;
    find(number, interface);
    TORCH_CHECK(
        number() == expected, "epload: expected ", path_, " of interface ", expected, ", got ", number(), rebuild_);
  }

  bool present() const {
    return handle_ != nullptr;
  }

  template <typename Fn>
  void find(Fn& fn, const char* name) const {
    fn = reinterpret_cast<Fn>(dlsym(handle_, name));
    TORCH_CHECK(fn != nullptr, "epload: ", path_, " has no ", name, rebuild_);
  }

 private:
  const char* rebuild_;
  std::string path_;
  void* handle_ = nullptr;
};

} // namespace epload

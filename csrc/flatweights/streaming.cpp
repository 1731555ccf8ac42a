#include "flatweights/streaming.hpp"

#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <fstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flatweights {
namespace {

constexpr std::size_t kUsual = std::size_t{32} << 20;  // typical for a group of cores in a server

// Returns the size of the first processor's third-level cache, or 0 if it is unknown. Asks Linux
// first: the C library, before glibc 2.37, adds up all such caches of an AMD socket.
std::size_t third_cache() {
  const std::string prefix = "/sys/devices/system/cpu/cpu0/cache/index";
  for (char index = '0'; index <= '9'; ++index) {
    int level = 0;
    std::size_t size = 0;
    char unit = 0;
    if (!(std::ifstream(prefix + index + "/level") >> level)) break;
    if (level == 3 && std::ifstream(prefix + index + "/size") >> size >> unit && unit == 'K')
      return size << 10;
  }
#ifdef _SC_LEVEL3_CACHE_SIZE
  if (const long found = sysconf(_SC_LEVEL3_CACHE_SIZE); found > 0)
    return static_cast<std::size_t>(found);
#endif
  return 0;
}

std::size_t decide() {
  if (const char* text = std::getenv("FLATWEIGHTS_STREAM_ABOVE"); text != nullptr && *text != 0) {
    const std::string_view given(text);
    std::size_t nbytes = 0;
    const char* const end = given.data() + given.size();
    const auto [rest, error] = std::from_chars(given.data(), end, nbytes);
    if (error != std::errc() || rest != end)
      throw std::invalid_argument("FLATWEIGHTS_STREAM_ABOVE: expected a number of bytes, got '" +
                                  std::string(given) + "'");
    return nbytes;
  }
  const std::size_t found = third_cache();
  return found > 0 ? found : kUsual;
}

}  // namespace

std::size_t stream_above() {
  static const std::size_t nbytes = decide();
  return nbytes;
}

bool pays_to_stream(std::size_t nbytes) { return nbytes > stream_above(); }

}  // namespace flatweights

#include "flatweights/streaming.hpp"

#include <unistd.h>

#include <fstream>
#include <string>

#include "flatweights/environment.hpp"

namespace flatweights {
namespace {

constexpr std::size_t kUsual = std::size_t{32} << 20;  // typical for a group of cores in a server

// Returns the size of the first processor's third-level cache, or kUsual if it is unknown. Asks
// Linux first: the C library, before glibc 2.37, adds up all such caches of an AMD socket.
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
  return kUsual;
}

}  // namespace

std::size_t stream_above() {
  static const std::size_t nbytes =
      bytes_from_environment("FLATWEIGHTS_STREAM_ABOVE").value_or(third_cache());
  return nbytes;
}

bool pays_to_stream(std::size_t nbytes) { return nbytes > stream_above(); }

}  // namespace flatweights

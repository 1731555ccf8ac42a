#include "flatweights/control_groups.hpp"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

namespace flatweights {
namespace {

constexpr std::uint64_t kUnlimited = std::numeric_limits<std::uint64_t>::max();
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 60;  // version 1 says 2^63 for no limit
constexpr std::uint64_t kSpare = 20;                          // a twentieth is left to others

struct Group {
  std::string folder;
  bool is_first_version;
};

// Whether `name` is in a list that commas separate.
bool is_among(std::string_view name, std::string_view list) {
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(','), list.size());
    if (list.substr(0, end) == name) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

// The groups of this process for `controller`, each before the one around it.
std::vector<Group> groups_of(const std::string& root, std::string_view controller) {
  std::vector<Group> groups;
  std::ifstream own(root + "/proc/self/cgroup");
  for (std::string line; std::getline(own, line);) {  // number:controllers:path
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool is_first_version = !controllers.empty();
    if (is_first_version && !is_among(controller, controllers)) continue;
    std::string top = root + "/sys/fs/cgroup";
    if (is_first_version) top.append("/").append(controller);
    std::string path = line.substr(second + 1);
    while (path.size() > 1 && path.front() == '/') {
      groups.push_back({top + path, is_first_version});
      path.resize(path.rfind('/'));
    }
    groups.push_back({top, is_first_version});
  }
  return groups;
}

// The number that a file begins with; none for "max", or if there is no such file.
template <class T>
std::optional<T> number_in(const std::string& file) {
  T number{};
  if (std::ifstream(file) >> number) return number;
  return std::nullopt;
}

std::uint64_t memory_limit_of(const Group& group) {
  const char* const name = group.is_first_version ? "/memory.limit_in_bytes" : "/memory.max";
  const std::uint64_t limit = number_in<std::uint64_t>(group.folder + name).value_or(kUnlimited);
  return limit < kMostBytes ? limit : kUnlimited;
}

// The value beside `key` in a file of lines "key value"; 0 if it is not there.
std::uint64_t value_of(const std::string& file, std::string_view key) {
  std::ifstream lines(file);
  std::string name;
  for (std::uint64_t value = 0; lines >> name >> value; lines.ignore(64, '\n'))
    if (name == key) return value;
  return 0;
}

std::uint64_t memory_used_by(const Group& group) {
  const bool first = group.is_first_version;
  const char* const name = first ? "/memory.usage_in_bytes" : "/memory.current";
  const std::uint64_t used = number_in<std::uint64_t>(group.folder + name).value_or(0);
  const char* const dropped = first ? "total_inactive_file" : "inactive_file";
  return used - std::min(used, value_of(group.folder + "/memory.stat", dropped));
}

// The processors that a group's quota allows; 0 if it sets no limit.
unsigned processors_of(const Group& group) {
  double quota = 0, period = 0;
  if (group.is_first_version) {  // -1 for no limit
    quota = number_in<double>(group.folder + "/cpu.cfs_quota_us").value_or(0);
    period = number_in<double>(group.folder + "/cpu.cfs_period_us").value_or(0);
  } else {
    std::ifstream file(group.folder + "/cpu.max");
    if (!(file >> quota >> period)) return 0;
  }
  if (!(quota > 0) || !(period > 0)) return 0;
  return static_cast<unsigned>(std::max(1.0, std::floor(quota / period)));
}

}  // namespace

unsigned processor_limit(const std::string& root) {
  unsigned limit = 0;
  for (const Group& group : groups_of(root, "cpu")) {
    const unsigned allowed = processors_of(group);
    if (allowed != 0 && (limit == 0 || allowed < limit)) limit = allowed;
  }
  return limit;
}

std::uint64_t memory_limit(const std::string& root) {
  std::uint64_t limit = kUnlimited;
  for (const Group& group : groups_of(root, "memory"))
    limit = std::min(limit, memory_limit_of(group));
  return limit;
}

std::uint64_t free_memory(const std::string& root) {
  constexpr std::uint64_t kKibi = 1024;
  const std::uint64_t available = value_of(root + "/proc/meminfo", "MemAvailable:") * kKibi;
  std::uint64_t least = available == 0 ? kUnlimited : available - available / kSpare;
  for (const Group& group : groups_of(root, "memory")) {
    const std::uint64_t limit = memory_limit_of(group);
    if (limit == kUnlimited) continue;
    const std::uint64_t usable = limit - limit / kSpare;
    least = std::min(least, usable - std::min(usable, memory_used_by(group)));
  }
  return least;
}

}  // namespace flatweights

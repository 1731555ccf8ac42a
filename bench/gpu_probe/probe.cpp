// What flatweights needs to know of an NVIDIA GPU before its rounds can stay there; see
// __main__.py.
//
// Each section is a process of its own, with a time limit: one that crashes or hangs costs its own
// figures only. This process never calls the driver, which does not survive a fork.
#include <sys/utsname.h>

#include <cstdlib>
#include <fstream>

#include "averages.hpp"
#include "copies.hpp"
#include "driver.hpp"
#include "harness.hpp"
#include "hops.hpp"
#include "memory.hpp"

namespace probe {
namespace {

// Whether confidential computing is on; by NVIDIA's management library.
std::string confidential_computing() {
  struct State {
    unsigned environment, feature, tools;
  };
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library == nullptr) return "unknown: no libnvidia-ml.so.1";
  const auto begin = reinterpret_cast<int (*)()>(dlsym(library, "nvmlInit_v2"));
  const auto query =
      reinterpret_cast<int (*)(State*)>(dlsym(library, "nvmlSystemGetConfComputeState"));
  if (begin == nullptr || query == nullptr) return "unknown: old libnvidia-ml.so.1";
  State state{};
  int result = begin();
  if (result == 0) result = query(&state);
  if (result != 0) return format("unknown: error %d", result);
  return state.feature != 0 ? "on" : "off";
}

// a. The GPU and what it says of itself.
void probe_attributes(const Report& report) {
  utsname system{};
  uname(&system);
  report.text("system", std::string(system.sysname) + " " + system.release);
  report.text("confidential computing", confidential_computing());
  const double begin = now();
  const CUdevice device = first_device();
  report.add("loading the driver and cuInit", 1e3 * (now() - begin), "ms");
  int version = 0, count = 0;
  CALL(cuDriverGetVersion, &version);
  CALL(cuDeviceGetCount, &count);
  report.text("CUDA of the driver", format("%d.%d", version / 1000, version % 1000 / 10));
  report.add("GPUs", count, "");
  char name[256] = {};
  CALL(cuDeviceGetName, name, 256, device);
  report.text("name", name);
  CUuuid uuid{};
  CALL(cuDeviceGetUuid, &uuid, device);
  std::string text;
  for (const char byte : uuid.bytes) text += format("%02x", static_cast<unsigned char>(byte));
  report.text("UUID", text);
  std::size_t total = 0;
  CALL(cuDeviceTotalMem, &total, device);
  report.add("memory", 1e-9 * static_cast<double>(total), "GB");
  const std::pair<const char*, int> attributes[] = {
      {"VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", 102},
      {"HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED", 103},
      {"COMPUTE_CAPABILITY_MAJOR", 75},
      {"COMPUTE_CAPABILITY_MINOR", 76},
      {"MULTIPROCESSOR_COUNT", 16},
      {"MAX_THREADS_PER_MULTIPROCESSOR", 39},
      {"L2_CACHE_SIZE", 38},
      {"CLOCK_RATE (kHz)", 13},
      {"MEMORY_CLOCK_RATE (kHz)", 36},
      {"GLOBAL_MEMORY_BUS_WIDTH", 37},
      {"ASYNC_ENGINE_COUNT", 40},
      {"SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO", 87},
      {"UNIFIED_ADDRESSING", 41},
      {"COMPUTE_MODE", 20},
      {"CAN_MAP_HOST_MEMORY", 19},
      {"PAGEABLE_MEMORY_ACCESS", 88},
      {"COMPUTE_PREEMPTION_SUPPORTED", 90},
      {"CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", 91},
      {"HOST_REGISTER_SUPPORTED", 99},
      {"READ_ONLY_HOST_REGISTER_SUPPORTED", 113},
      {"GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED", 110},
      {"MEMORY_POOLS_SUPPORTED", 115},
      {"GPU_DIRECT_RDMA_SUPPORTED", 116},
      {"IPC_EVENT_SUPPORTED", 125},
      {"HANDLE_TYPE_FABRIC_SUPPORTED", 128},
  };
  for (const auto& [what, number] : attributes)
    report.add(what, attribute(device, static_cast<CUdevice_attribute>(number)), "");
  const CUmemAllocationProp properties = segment_properties(device);
  for (const bool recommended : {false, true}) {
    std::size_t granularity = 0;
    CALL(cuMemGetAllocationGranularity, &granularity, &properties,
         recommended ? CU_MEM_ALLOC_GRANULARITY_RECOMMENDED : CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    report.add(recommended ? "granularity, recommended" : "granularity, minimum",
               static_cast<double>(granularity), "bytes");
  }
  const Gpu gpu;
  report.add("free memory, with this context", 1e-6 * static_cast<double>(gpu.free_memory()), "MB");
}

struct Section {
  char letter;
  const char* title;
  double seconds;  // at most
  std::function<void(const Report&)> body;
};

// Everything that was found, for the table and the JSON.
class Results {
 public:
  explicit Results(std::string path) : path_(std::move(path)) {}

  // Adds a line of Report: name, value, unit and kind.
  void add(char letter, const std::string& line) {
    std::vector<std::string> fields(1);
    for (const char c : line) {
      if (c == '\t')
        fields.emplace_back();
      else
        fields.back() += c;
    }
    fields.resize(4);
    const std::string& name = fields[0];
    const std::string& value = fields[1];
    const std::string& unit = fields[2];
    std::printf("%c: %s: %s%s%s\n", letter, name.c_str(), value.c_str(), unit.empty() ? "" : " ",
                unit.c_str());
    std::fflush(stdout);
    const bool is_number = fields[3] == "number" && value.find_first_of("fn") == std::string::npos;
    json_ += (json_.empty() ? "" : ",\n") + std::string(" {\"section\": \"") + letter +
             "\", \"name\": " + quoted(name) +
             ", \"value\": " + (is_number ? value : quoted(value)) + ", \"unit\": " + quoted(unit) +
             "}";
  }

  // After each section, so that a crash of the machine leaves something.
  void write() const {
    if (path_.empty()) return;
    std::ofstream file(path_);
    file << "[\n" << json_ << "\n]\n";
  }

 private:
  static std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
      if (c == '"' || c == '\\') out += '\\';
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + "\"";
  }

  std::string path_, json_;
};

void run(const Section& section, double seconds, Results& results) {
  int ends[2];
  if (pipe(ends) != 0) return;
  const double begin = now();
  const pid_t child = fork();
  if (child == 0) {
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    close(ends[0]);
    const Report report(ends[1]);
    try {
      section.body(report);
    } catch (const std::exception& error) {
      report.text("STOPPED", error.what());
    }
    std::fflush(nullptr);
    _exit(0);
  }
  setpgid(child, child);
  close(ends[1]);
  fcntl(ends[0], F_SETFL, O_NONBLOCK);
  std::string text;
  const auto drain = [&] {
    char bytes[65536];
    for (ssize_t got = 0; (got = read(ends[0], bytes, sizeof(bytes))) > 0;)
      text.append(bytes, static_cast<std::size_t>(got));
    for (std::size_t end = 0; (end = text.find('\n')) != std::string::npos;) {
      results.add(section.letter, text.substr(0, end));
      text.erase(0, end + 1);
    }
  };
  int status = 0;
  bool over = false;
  while (!over) {
    pollfd waiting{ends[0], POLLIN, 0};
    poll(&waiting, 1, 20);
    drain();
    if (waitpid(child, &status, WNOHANG) == child) {
      over = true;
      if (WIFSIGNALED(status))
        results.add(section.letter, format("STOPPED\tkilled by signal %d\t", WTERMSIG(status)));
    } else if (now() - begin > seconds) {
      over = true;
      results.add(section.letter, format("STOPPED\tnot done after %.0f s\t", seconds));
      kill(-child, SIGKILL);
      finish(child, 0);
    }
  }
  kill(-child, SIGKILL);  // its helpers
  drain();
  close(ends[0]);
  results.add(section.letter, format("time of this section\t%.2f\ts\tnumber", now() - begin));
  results.write();
}

}  // namespace
}  // namespace probe

// probe KERNELS.ptx JSON SECONDS PATTERNS [SECTIONS]
int main(int argc, char** argv) {
  using namespace probe;
  if (argc < 5) {
    std::fprintf(stderr, "usage: probe KERNELS.ptx JSON SECONDS PATTERNS [SECTIONS]\n");
    return 2;
  }
  kernels_path() = argv[1];
  Results results(argv[2]);
  const double seconds = std::atof(argv[3]);
  const auto patterns = static_cast<std::size_t>(std::atof(argv[4]));
  const std::string wanted = argc > 5 ? argv[5] : "";
  const Section sections[] = {
      {'a', "attributes", 15, probe_attributes},
      {'b', "segments on the GPU", 20, probe_segments},
      {'g', "calls", 10, probe_calls},
      {'e', "copies of many variables", 15, probe_copies},
      {'h', "registered segments", 20, probe_registers},
      {'f', "averages", 30, [patterns](const Report& report) { probe_averages(report, patterns); }},
      {'j', "the host's memory", 10, probe_host},
      {'d', "hops between processes", 35, probe_hops},
      {'c', "killed creators", 30, probe_kills},
      {'i', "a forbidden write", 15, probe_poison},
  };
  const double begin = now();
  for (const Section& section : sections) {
    if (!wanted.empty() && wanted.find(section.letter) == std::string::npos) continue;
    const double left = seconds - (now() - begin);
    std::printf("\n%c. %s\n", section.letter, section.title);
    std::fflush(stdout);
    if (left < 2)
      results.add(section.letter, "STOPPED\tno time is left\t");
    else
      run(section, std::min(section.seconds, left), results);
  }
  results.write();
  std::printf("\n%.1f s in all\n", now() - begin);
  return 0;
}

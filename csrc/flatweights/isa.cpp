// Chooses the instruction set.
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "flatweights/kernels.hpp"

namespace flatweights {

#ifdef FLATWEIGHTS_X86
extern const Kernels kernels_baseline;
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#else
extern const Kernels kernels_portable;
#endif
#ifdef FLATWEIGHTS_ARM64
extern const Kernels kernels_neon;
#endif

namespace {

#ifdef FLATWEIGHTS_X86
// The portable loops are not compiled again: those of the baseline differ only in stores past the
// caches, which all x86-64 processors have.
const Kernels kernels_portable = [] {
  Kernels same = kernels_baseline;
  same.name = "portable";
  return same;
}();
#endif

struct Candidate {
  const Kernels* kernels;
  bool runs_here;
};

// Returns the named set, or the first that runs here: they are in order of speed.
const Kernels* decide_kernels() {
#ifdef FLATWEIGHTS_X86
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") &&
                    __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  const Candidate candidates[] = {{&kernels_avx512, avx512},
                                  {&kernels_avx2, avx2},
                                  {&kernels_baseline, true},
                                  {&kernels_portable, true}};
#elif defined(FLATWEIGHTS_ARM64)
  const Candidate candidates[] = {{&kernels_neon, true}, {&kernels_portable, true}};
#else
  const Candidate candidates[] = {{&kernels_portable, true}};
#endif
  const char* const wanted = std::getenv("FLATWEIGHTS_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  std::string usable;
  for (const Candidate& candidate : candidates) {
    if (!candidate.runs_here) continue;
    if (any || std::string_view(wanted) == candidate.kernels->name) return candidate.kernels;
    usable += (usable.empty() ? "" : ", ") + std::string(candidate.kernels->name);
  }
  throw std::invalid_argument("FLATWEIGHTS_ISA: expected one of " + usable + ", got '" + wanted +
                              "'");
}

}  // namespace

const Kernels& kernels() {
  static std::atomic<const Kernels*> chosen{nullptr};
  const Kernels* found = chosen.load(std::memory_order_relaxed);
  if (found == nullptr) {
    found = decide_kernels();
    chosen.store(found, std::memory_order_relaxed);
  }
  return *found;
}

}  // namespace flatweights

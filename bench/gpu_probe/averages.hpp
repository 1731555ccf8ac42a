// The averaging kernel: its rate, and its bits against those of the processor's: section f.
#pragma once

#include <cstdint>
#include <thread>

#include "copies.hpp"
#include "driver.hpp"
#include "flatweights/device_average.hpp"
#include "flatweights/device_average_body.hpp"
#include "flatweights/device_average_ptx.hpp"
#include "flatweights/kernels.hpp"
#include "harness.hpp"

namespace flatweights {
extern const Kernels kernels_portable;
}

namespace probe {

using flatweights::AveragePiece;
using flatweights::DeviceAverage;
using flatweights::kFormats;
using flatweights::kReals;

inline constexpr const char* kRealNames[kReals] = {"float16", "bfloat16", "float32", "float64"};

// Calls `body(begin, end)` for shares of [0, count), in one thread each.
template <class F>
void in_parallel(std::size_t count, F&& body) {
  const std::size_t threads = std::max(1u, std::thread::hardware_concurrency());
  const std::size_t share = (count / threads + 64) / 64 * 64;
  std::vector<std::thread> all;
  for (std::size_t begin = 0; begin < count; begin += share)
    all.emplace_back([&body, begin, end = std::min(count, begin + share)] { body(begin, end); });
  for (std::thread& thread : all) thread.join();
}

// Random bits of element `i` of source `k`.
inline std::uint64_t hash(std::uint64_t i, std::uint64_t k) {  // SplitMix64
  std::uint64_t x = (i * 64 + k) * 0x9e3779b97f4a7c15u + 0x1234567;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The bits of a number: of each 256 elements, the first 64 have any bits; the next are of magnitude
// 2^-8 to 2^8; the next often NaN, infinity, 0, subnormal, or the largest; the last nearly cancel
// those of the source before.
inline std::uint64_t number(std::size_t real, std::uint64_t i, std::uint64_t k) {
  const flatweights::RealFormat& format = kFormats[real];
  const unsigned width = static_cast<unsigned>(8 * format.size);
  const std::uint64_t ones = width == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << width) - 1;
  const std::uint64_t sign = std::uint64_t{1} << (width - 1);
  const std::uint64_t fraction = (std::uint64_t{1} << format.mantissa) - 1;
  const std::uint64_t random = hash(i, k);
  const unsigned kind = static_cast<unsigned>(i / 64 % 4);
  const auto near_one = [&](std::uint64_t bits) {
    const std::uint64_t exponent = format.bias - 8 + (bits >> 52) % 16;
    return ((bits & fraction) | exponent << format.mantissa | ((bits >> 60 & 1) != 0 ? sign : 0)) &
           ones;
  };
  if (kind == 0) return random & ones;
  if (kind == 1) return near_one(random);
  if (kind == 2) {
    const std::uint64_t signs = (random >> 63 & 1) != 0 ? sign : 0;
    switch (random % 8) {
      case 0:
        return signs;
      case 1:
        return (random >> 8) % 16 == 0 ? signs | format.exponent() : near_one(random);
      case 2:
        return (random >> 8) % 16 == 0 ? signs | format.exponent() | (random >> 12 & fraction) | 1
                                       : signs | 1;
      case 3:
        return signs | (random >> 12 & fraction);  // subnormal
      case 4:
        return signs | (format.exponent() - 1);  // the largest
      case 5:
        return signs | (fraction + 1);  // the smallest normal number
      default:
        return near_one(random);
    }
  }
  return k % 2 == 0 ? near_one(random) : near_one(hash(i, k - 1)) ^ sign ^ (random % 4);
}

inline void write_numbers(std::byte* out, std::size_t real, std::size_t count, std::uint64_t k) {
  const std::size_t size = kFormats[real].size;
  in_parallel(count, [&](std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end; ++i) {
      const std::uint64_t bits = number(real, i, k);
      std::memcpy(out + i * size, &bits, size);
    }
  });
}

// One slot in pieces of at most `most` bytes.
inline std::vector<AveragePiece> pieces_of(std::uint64_t offset, std::size_t count,
                                           std::size_t real, std::size_t most) {
  const std::size_t size = real == flatweights::kKept ? 1 : kFormats[real].size;
  std::vector<AveragePiece> pieces;
  for (std::size_t done = 0; done < count; done += most / size)
    pieces.push_back({offset + done * size,
                      static_cast<std::uint32_t>(std::min(most / size, count - done)),
                      static_cast<std::uint32_t>(real)});
  return pieces;
}

// The weights of `count` sources, and their sum. Kinds: all 1; any; with a power of two as sum.
struct Weights {
  std::vector<double> values;
  double total = 0;
  bool weighted;

  Weights(std::size_t count, int kind) : weighted(kind != 0) {
    double last = 1;
    for (std::size_t k = 0; k < count; ++k) {
      double weight = 1;
      if (kind == 1) weight = k == 0 ? 1 : static_cast<double>(1 + hash(k, 5) % 1000) / 777;
      if (kind == 2 && k > 0) weight = k + 1 < count ? last / 2 : last;
      values.push_back(weight);
      last = weight;
      total += weight;
    }
  }
};
inline constexpr const char* kWeightNames[] = {"no weights", "weights", "weights, sum 2^n"};

inline void set_weights(DeviceAverage& job, const Weights& weights) {
  const flatweights::Divisor divisor(weights.total);
  job.factor = divisor.factor;
  job.multiply = divisor.multiply ? 1 : 0;
  job.weighted = weights.weighted ? 1 : 0;
  job.num_sources = static_cast<std::uint32_t>(weights.values.size());
  std::copy(weights.values.begin(), weights.values.end(), job.weights);
}

struct Difference {
  std::atomic<std::size_t> count{0};
  std::atomic<std::size_t> first{~std::size_t{0}};
};

// Compares the means `got` with those of the portable kernels.
inline void compare(Difference& difference, std::size_t real,
                    const std::vector<const std::byte*>& sources, const Weights& weights,
                    std::size_t count, std::byte* expected, const std::byte* got) {
  const std::size_t size = kFormats[real].size;
  in_parallel(count, [&](std::size_t begin, std::size_t end) {
    flatweights::kernels_portable.average[real](
        expected, sources.data(), weights.weighted ? weights.values.data() : nullptr,
        weights.values.size(), weights.total, begin, end, false, nullptr);
    if (std::memcmp(expected + begin * size, got + begin * size, (end - begin) * size) == 0) return;
    for (std::size_t i = begin; i < end; ++i) {
      if (std::memcmp(expected + i * size, got + i * size, size) == 0) continue;
      difference.count.fetch_add(1);
      std::size_t first = difference.first.load();
      while (i < first && !difference.first.compare_exchange_weak(first, i)) {
      }
    }
  });
}

inline std::string hex(const std::byte* memory, std::size_t i, std::size_t size) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, memory + i * size, size);
  return format("%0*llx", static_cast<int>(2 * size), static_cast<unsigned long long>(bits));
}

inline constexpr std::size_t kCounts[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 17};
inline constexpr std::size_t kMost = 17;

// Compares all means of `count` numbers by `average(job, real)`, which fills `got`.
// `base(k)` is the address of source k for it.
template <class Base, class Average>
void compare_bits(const Report& report, const std::string& label, std::size_t real,
                  std::size_t count, const std::vector<std::byte*>& memory, Base&& base,
                  std::byte* expected, const std::byte* got, Average&& average) {
  const std::size_t size = kFormats[real].size;
  std::size_t compared = 0, wrong = 0;
  for (const std::size_t models : kCounts) {
    for (int kind = 0; kind < 3; ++kind) {
      const Weights weights(models, kind);
      DeviceAverage job{};
      set_weights(job, weights);
      for (std::size_t k = 0; k < models; ++k) job.sources[k] = base(k);
      average(job);
      const std::vector<const std::byte*> sources(
          memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(models));
      Difference difference;
      compare(difference, real, sources, weights, count, expected, got);
      compared += count;
      wrong += difference.count;
      if (difference.count == 0) continue;
      const std::size_t i = difference.first;
      std::string text =
          format("%zu differ; first, element %zu: expected ", difference.count.load(), i) +
          hex(expected, i, size) + ", got " + hex(got, i, size) + ", of";
      for (std::size_t k = 0; k < models; ++k) text += " " + hex(memory[k], i, size);
      report.text(label + kRealNames[real] + format(", N=%zu, ", models) + kWeightNames[kind],
                  text);
    }
  }
  report.add(label + kRealNames[real] + ", means compared", static_cast<double>(compared), "");
  report.add(label + kRealNames[real] + ", means that differ", static_cast<double>(wrong), "");
}

// f, without a GPU: the kernel's body, compiled for the processor.
inline void probe_body(const Report& report, std::size_t patterns) {
  const std::size_t count = patterns + 3;
  for (std::size_t real = 0; real < kReals; ++real) {
    const std::size_t nbytes = (count * kFormats[real].size + 63) / 64 * 64;
    std::vector<std::byte*> memory;
    for (std::size_t k = 0; k < kMost + 2; ++k) {
      memory.push_back(static_cast<std::byte*>(std::aligned_alloc(64, nbytes)));
      if (k < kMost) write_numbers(memory[k], real, count, k);
    }
    std::byte* const got = memory[kMost + 1];
    const std::vector<AveragePiece> pieces = pieces_of(0, count, real, 65536);
    compare_bits(
        report, "body on the processor, ", real, count, memory,
        [&](std::size_t k) { return memory[k]; }, memory[kMost], got,
        [&](DeviceAverage& job) {
          job.out = got;
          in_parallel(pieces.size(), [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i)
              for (std::uint32_t thread = 0; thread < 256; ++thread)
                flatweights::average_piece(job, pieces[i], thread, 256);
          });
        });
    for (std::byte* each : memory) std::free(each);
  }
}

class AverageKernel {
 public:
  explicit AverageKernel(Gpu& gpu)
      : gpu_(gpu), function_(gpu.function(flatweights::kDeviceAveragePtx, "flatweights_average")) {}

  // Gives jobs these pieces.
  void use(const std::vector<AveragePiece>& pieces) {
    if (pieces_ != 0) CALL(cuMemFree, pieces_);
    pieces_ = gpu_.allocate(pieces.size() * sizeof(AveragePiece));
    CALL(cuMemcpyHtoD, pieces_, static_cast<const void*>(pieces.data()),
         pieces.size() * sizeof(AveragePiece));
    CALL(cuCtxSynchronize);
    count_ = static_cast<unsigned>(pieces.size());
  }

  // One block for each piece, or `blocks` that share them.
  void launch(DeviceAverage& job, unsigned blocks = 0) const {
    job.pieces = reinterpret_cast<const AveragePiece*>(pieces_);
    job.num_pieces = count_;
    gpu_.launch2(function_, blocks == 0 ? count_ : std::min(blocks, count_), 1, 256, job);
  }

 private:
  Gpu& gpu_;
  CUfunction function_;
  CUdeviceptr pieces_ = 0;
  unsigned count_ = 0;
};

inline std::byte* at(CUdeviceptr address) { return reinterpret_cast<std::byte*>(address); }

inline void probe_rates(const Report& report, Gpu& gpu, AverageKernel& kernel) {
  const Model model(resnet50());
  constexpr std::size_t kSources = 8;
  std::vector<CUdeviceptr> sources;
  for (std::size_t k = 0; k < kSources; ++k) {
    sources.push_back(gpu.allocate(model.nbytes));
    CALL(cuMemsetD8, sources.back(), static_cast<unsigned char>(0x30 + k), model.nbytes);
  }
  const CUdeviceptr out = gpu.allocate(model.nbytes);
  CALL(cuCtxSynchronize);
  const auto traffic = [&](std::size_t count, const Took& took) {
    return 1e-9 * static_cast<double>((count + 1) * model.nbytes) / took.gpu;
  };
  const Took copied =
      took(gpu, 11, [&] { CALL(cuMemcpyDtoDAsync, out, sources[0], model.nbytes, gpu.stream()); });
  report.add("cuMemcpyDtoDAsync, read and written", traffic(1, copied), "GB/s");
  const auto blocks_of =
      static_cast<unsigned>(attribute(gpu.device(), CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) * 5);
  const auto run = [&](std::size_t real, std::size_t count, int kind, std::size_t most,
                       unsigned blocks) {
    std::vector<AveragePiece> pieces;
    for (std::size_t i = 0; i < model.sizes.size(); ++i) {
      const std::size_t elements =
          real == flatweights::kKept ? model.sizes[i] : model.sizes[i] / kFormats[real].size;
      for (const AveragePiece& piece : pieces_of(model.packed[i], elements, real, most))
        pieces.push_back(piece);
    }
    kernel.use(pieces);
    DeviceAverage job{};
    set_weights(job, Weights(count, kind));
    for (std::size_t k = 0; k < count; ++k) job.sources[k] = at(sources[k]);
    job.out = at(out);
    const Took time = took(gpu, 11, [&] { kernel.launch(job, blocks); });
    const std::string name =
        std::string(real == flatweights::kKept ? "kept bytes" : kRealNames[real]) +
        format(", N=%zu, %s, pieces of %zu KiB%s", count, kWeightNames[kind], most / 1024,
               blocks != 0 ? ", blocks that stay" : "");
    report.add(name + ", traffic", traffic(real == flatweights::kKept ? 1 : count, time), "GB/s");
    report.add(name + ", on the GPU", 1e3 * time.gpu, "ms");
    report.add(name + ", until it is there", 1e3 * time.host, "ms");
  };
  for (const std::size_t most : {4096, 8192, 16384, 32768, 65536}) run(2, 2, 0, most, 0);
  for (const std::size_t most : {4096, 16384}) run(2, 2, 0, most, blocks_of);
  for (std::size_t real = 0; real < kReals; ++real)
    for (const std::size_t count : {2, 8}) run(real, count, 0, 16384, 0);
  for (const std::size_t count : {3, 8}) run(2, count, 1, 16384, 0);
  run(3, 3, 1, 16384, 0);
  run(flatweights::kKept, 1, 0, 16384, 0);
  for (const CUdeviceptr source : sources) CALL(cuMemFree, source);
  CALL(cuMemFree, out);
}

inline void probe_bits(const Report& report, Gpu& gpu, AverageKernel& kernel,
                       std::size_t patterns) {
  const std::size_t count = patterns + 3;
  for (std::size_t real = 0; real < kReals; ++real) {
    const std::size_t nbytes = (count * kFormats[real].size + 63) / 64 * 64;
    std::vector<std::byte*> memory;
    std::vector<CUdeviceptr> sources;
    std::vector<std::byte> random(nbytes), expected(nbytes);
    std::vector<std::vector<std::byte>> kept(kMost, std::vector<std::byte>(nbytes));
    for (std::size_t k = 0; k < kMost; ++k) {
      memory.push_back(kept[k].data());
      write_numbers(memory[k], real, count, k);
      sources.push_back(gpu.allocate(nbytes));
      CALL(cuMemcpyHtoD, sources[k], static_cast<const void*>(memory[k]), nbytes);
    }
    const CUdeviceptr out = gpu.allocate(nbytes);
    auto* const got = static_cast<std::byte*>(gpu.pinned(nbytes));
    kernel.use(pieces_of(0, count, real, 65536));
    compare_bits(
        report, "", real, count, memory, [&](std::size_t k) { return at(sources[k]); },
        expected.data(), got,
        [&](DeviceAverage& job) {
          CALL(cuMemsetD8, out, static_cast<unsigned char>(0x55), nbytes);
          CALL(cuCtxSynchronize);
          job.out = at(out);
          kernel.launch(job);
          gpu.wait();
          CALL(cuMemcpyDtoH, static_cast<void*>(got), out, count * kFormats[real].size);
        });

    // The flags of sources that are not finite.
    const CUdeviceptr flags = gpu.allocate(4 * kMost);
    for (const CUdeviceptr source : sources)
      CALL(cuMemsetD8, source, static_cast<unsigned char>(0x31), nbytes);
    const std::uint64_t infinity = kFormats[real].exponent();
    CALL(cuMemcpyHtoD, sources[3] + (count - 1) * kFormats[real].size,
         static_cast<const void*>(&infinity), kFormats[real].size);
    CALL(cuMemsetD8, flags, static_cast<unsigned char>(0), std::size_t{4 * kMost});
    CALL(cuCtxSynchronize);
    DeviceAverage job{};
    set_weights(job, Weights(5, 1));
    for (std::size_t k = 0; k < 5; ++k) job.sources[k] = at(sources[k]);
    job.out = at(out);
    job.nonfinite = reinterpret_cast<std::uint32_t*>(flags);
    kernel.launch(job);
    gpu.wait();
    std::uint32_t found[kMost] = {};
    CALL(cuMemcpyDtoH, static_cast<void*>(found), flags, sizeof(found));
    report.text(std::string(kRealNames[real]) + ", flags of infinity in source 3 of 5",
                format("%u%u%u%u%u", found[0], found[1], found[2], found[3], found[4]));
    for (const CUdeviceptr source : sources) CALL(cuMemFree, source);
    CALL(cuMemFree, out);
    CALL(cuMemFree, flags);
    CALL(cuMemFreeHost, static_cast<void*>(got));
  }
}

// f. The averaging kernel.
inline void probe_averages(const Report& report, std::size_t patterns) {
  probe_body(report, patterns / 20);
  Gpu gpu;
  const double begin = now();
  AverageKernel kernel(gpu);
  report.add("the driver compiles the kernel in", 1e3 * (now() - begin), "ms");
  gpu.warm_up();
  probe_rates(report, gpu, kernel);
  probe_bits(report, gpu, kernel, patterns);
}

}  // namespace probe

// Runs all kernels of one instruction set and the portable kernels on the same numbers, and fails
// if a bit differs. Prints a digest of the results, which is the same on every machine.
//
// Compiled with FLATWEIGHTS_COMPARED, the name of the instruction set.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "flatweights/distances.hpp"
#include "flatweights/kernels.hpp"
#include "flatweights/sorting.hpp"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace flatweights {
extern const Kernels kernels_portable;
extern const Kernels JOIN(kernels_, FLATWEIGHTS_COMPARED);
}  // namespace flatweights

namespace {

using namespace flatweights;

using Buffer = std::vector<std::byte>;

class Random {
 public:
  std::uint64_t next() {  // xorshift64*
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545f4914f6cdd1d;
  }
  std::size_t below(std::size_t count) { return static_cast<std::size_t>(next() >> 33) % count; }

  // Bits of a number of magnitude 2^-8 to 2^8; if `odd`, sometimes the bits of any number.
  std::uint64_t number(std::size_t real, bool odd) {
    const RealFormat& format = kFormats[real];
    const std::uint64_t sign = (next() & 1) << (8 * kFormats[real].size - 1);
    const std::uint64_t mantissa = next() >> (64 - format.mantissa);
    std::uint64_t exponent = (format.bias - 8 + below(16)) << format.mantissa;
    const std::size_t kind = odd ? below(16) : 16;
    if (kind == 0) return sign;
    if (kind == 1) return sign | format.exponent();
    if (kind == 2) return sign | format.exponent() | (mantissa != 0 ? mantissa : 1);
    if (kind == 3) return sign | mantissa;  // subnormal
    if (kind < 8) exponent = next() >> 1 & format.exponent();
    return sign | exponent | mantissa;
  }

  Buffer numbers(std::size_t real, std::size_t count, bool odd) {
    Buffer numbers(count * kFormats[real].size);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t bits = number(real, odd);
      std::memcpy(numbers.data() + i * kFormats[real].size, &bits, kFormats[real].size);
    }
    return numbers;
  }

 private:
  std::uint64_t state_ = 88172645463325252;
};

std::uint64_t digest = 14695981039346656037u;  // FNV-1a

void compare(const std::string& what, const Buffer& expected, const Buffer& got) {
  if (expected != got) {
    std::size_t at = 0;
    while (expected[at] == got[at]) ++at;
    std::fprintf(stderr, "%s: byte %zu of %zu differs\n", what.c_str(), at, got.size());
    std::exit(1);
  }
  for (const std::byte byte : got)
    digest = (digest ^ static_cast<std::uint64_t>(byte)) * 1099511628211u;
}

// Numbers in the bits of a result; every NaN is the same.
Buffer bytes_of(const std::vector<double>& values) {
  Buffer bytes(values.size() * sizeof(double));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const double value = values[i] == values[i] ? values[i] : 0x1p1000;
    std::memcpy(bytes.data() + i * sizeof(double), &value, sizeof(value));
  }
  return bytes;
}

class Comparison {
 public:
  void run() {
    constexpr std::size_t kCounts[] = {0,  1,  2,  3,  7,  8,    15,   16,
                                       17, 31, 33, 63, 65, 1023, 1025, 4999};
    for (std::size_t real = 0; real < kReals; ++real)
      for (const std::size_t count : kCounts)
        for (const bool odd : {false, true}) run(real, count, odd);
  }

 private:
  // Calls `body(kernels)`, which returns the bytes of a result, for both sets.
  template <class F>
  void both(const std::string& what, F&& body) {
    compare(what + label_, body(kernels_portable), body(JOIN(kernels_, FLATWEIGHTS_COMPARED)));
  }

  void run(std::size_t real, std::size_t count, bool odd) {
    const std::size_t size = kFormats[real].size;
    const std::size_t begin = random_.below(9), end = begin + count;
    const std::size_t shift = random_.below(64);  // of memory, from an aligned address
    label_ = ", type " + std::to_string(real) + ", " + std::to_string(count) + " numbers";
    std::vector<Buffer> memory;
    std::vector<const std::byte*> sources;
    std::vector<double> weights;
    double total = 0;
    for (std::size_t k = 0; k < 19; ++k) {
      memory.push_back(random_.numbers(real, end + 64, odd && k == 3));
      weights.push_back(static_cast<double>(1 + random_.below(7)) / 8);
    }
    for (const Buffer& source : memory) sources.push_back(source.data() + shift % 16);
    const Buffer y = random_.numbers(real, end, odd);
    const double factor = 0.3;
    const std::byte* const x = sources[3];

    for (const std::size_t models : {1, 2, 4, 5, 16, 19}) {
      total = 0;
      for (std::size_t k = 0; k < models; ++k) total += weights[k];
      const auto average = [&](auto loop, std::size_t out_size, bool weighted, bool stream) {
        // At least a line around the written bytes, at a random alignment.
        Buffer out(end * out_size + 192), room(kRoom + 64);
        std::byte* const to =
            out.data() + aligned(out) + (stream ? 0 : shift / out_size * out_size);
        const bool finite = loop(to, sources.data(), weighted ? weights.data() : nullptr, models,
                                 weighted ? total : static_cast<double>(models), begin, end, stream,
                                 room.data() + aligned(room));
        Buffer result(to, to + end * out_size);
        result.push_back(std::byte{finite});
        return result;
      };
      for (const bool weighted : {false, true}) {
        for (const bool stream : {false, true}) {
          both("average",
               [&](const Kernels& k) { return average(k.average[real], size, weighted, stream); });
          for (std::size_t wide = 0; real < 2 && wide < 2; ++wide)
            both("average_widened", [&](const Kernels& k) {
              return average(k.average_widened[real][wide], kFormats[2 + wide].size, weighted,
                             stream);
            });
        }
      }
    }
    for (const std::size_t models : {1, 2, 3, 5, 8, 15, 16, 19}) {
      const Ranks all[] = {{(models - 1) / 2, models / 2 + 1, 0},
                           {models / 5, models - models / 5, 0},
                           {0, models, (models + 1) / 2}};
      for (const Ranks ranks : all) {
        const SortingPlan plan(models, ranks);
        for (const bool stream : {false, true}) {
          both("order", [&](const Kernels& k) {
            const Sorting sorting = plan.view();
            Buffer out(end * size + 192), room(room_bytes(sorting) + 64);
            std::byte* const to = out.data() + aligned(out) + (stream ? 0 : shift / size * size);
            const bool finite = k.order[real](to, sources.data(), sorting, begin, end, stream,
                                              room.data() + aligned(room));
            Buffer result(to, to + end * size);
            result.push_back(std::byte{finite});
            return result;
          });
        }
      }
    }
    for (const std::size_t models : {2, 3, 5, 8, 11}) {
      for (const bool wide : {false, true}) {
        both("distances", [&](const Kernels& k) {
          std::vector<double> sums(models * (models - 1) / 2 * kDistanceColumns, 0.25);
          Buffer room(models * (sizeof(void*) + kDistanceBlock * sizeof(double)) + 128);
          k.distances[real][wide ? 1 : 0](sums.data(), sources.data(), models, begin, end,
                                          room.data() + aligned(room));
          return bytes_of(sums);
        });
      }
    }
    both("add", [&](const Kernels& k) {
      std::vector<double> sums(count, 0.5), lost(count, 0x1p-60);
      k.add[real](sums.data(), real == 3 ? lost.data() : nullptr, x, factor, begin, end);
      sums.insert(sums.end(), lost.begin(), lost.end());
      return bytes_of(sums);
    });
    both("divide", [&](const Kernels& k) {
      const std::vector<double> sums(count, 1.0), lost(count, 0x1p-54);
      Buffer out(end * size);
      k.divide[real](out.data(), sums.data(), lost.data(), 3.0, begin, end);
      return out;
    });
    both("has_nonfinite",
         [&](const Kernels& k) { return Buffer{std::byte{k.has_nonfinite[real](x, begin, end)}}; });
    both("scale", [&](const Kernels& k) {
      Buffer out = y;
      k.scale[real](out.data(), factor, begin, end);
      return out;
    });
    both("axpy", [&](const Kernels& k) {
      Buffer out = y;
      k.axpy[real](out.data(), factor, x, begin, end);
      return out;
    });
    for (const double share : {0.0, 0.3, 0.8, 1.0}) {
      both("lerp", [&](const Kernels& k) {
        Buffer out = y;
        k.lerp[real](out.data(), x, share, begin, end);
        return out;
      });
    }
    both("squares", [&](const Kernels& k) {
      std::vector<double> sum{0, 0};
      k.squares[real](&sum[0], &sum[1], x, factor, begin, end);
      return bytes_of(sum);
    });
    for (std::size_t to = 0; to < kReals; ++to) {
      if (to == real) continue;
      both("convert", [&](const Kernels& k) {
        Buffer out(end * kFormats[to].size);
        k.convert[real][to](out.data(), x, begin, end);
        return out;
      });
    }
    for (const bool stream : {false, true}) {
      both("copy", [&](const Kernels& k) {
        Buffer out(count * size);
        k.copy(out.data(), x, out.size(), stream);
        return out;
      });
    }
    for (std::size_t narrow = 0; real >= 2 && narrow < 2; ++narrow) {
      for (int given = 0; given < 4; ++given) {
        both("encode", [&](const Kernels& k) {
          Buffer model = y, difference(end * 2), next(end * size);
          const DifferencePart part{{},
                                    {},
                                    end,
                                    0,
                                    false,
                                    model.data(),
                                    difference.data(),
                                    given & 1 ? sources[4] : nullptr,
                                    given & 2 ? sources[5] : nullptr,
                                    next.data()};
          const bool finite = k.encode[real - 2][narrow](part, begin, end);
          // The rounding error of NaN is a NaN of any sign. It is not used, since NaN is refused.
          if (finite) difference.insert(difference.end(), next.begin(), next.end());
          difference.push_back(std::byte{finite});
          return difference;
        });
      }
    }
    if (real >= 2) compare_adapt(real == 3, end);
  }

  void compare_adapt(bool wide, std::size_t count) {
    const std::size_t real = wide ? 3 : 2;
    std::vector<Buffer> start;
    for (int k = 0; k < 5; ++k) start.push_back(random_.numbers(real, count, false));
    for (const SecondMoment kind : {SecondMoment::kSum, SecondMoment::kMean, SecondMoment::kSign}) {
      for (const int given : {0, 1, 2, 3, 4, 5, 6, 7}) {
        const bool has_first = (given & 1) != 0;
        const bool has_before = (given & 2) != 0;
        const double beta1 = (given & 4) != 0 ? 0.9 : 0.1;
        const double beta2 = (given & 4) != 0 ? 0.98 : 0.2;
        both("adapt", [&](const Kernels& k) {
          std::vector<Buffer> v = start;
          std::vector<std::byte>& second = v[2];  // not negative
          for (std::size_t i = 0; i < count; ++i)
            second[(i + 1) * kFormats[real].size - 1] &= std::byte{0x7f};
          const AdaptiveRange range{wide,
                                    count,
                                    v[0].data(),
                                    has_first ? v[1].data() : nullptr,
                                    second.data(),
                                    v[3].data(),
                                    has_before ? v[4].data() : nullptr};
          // If a sign made squares negative, the results would be NaN of any sign.
          const double kept = kind == SecondMoment::kSign ? 1 - 0x1p-40 : beta2;
          const AdaptiveRates rates{0.1, beta1, kept, 1e-3};
          k.adapt[wide ? 1 : 0](range, kind, rates, 0, count);
          Buffer result = v[0];
          result.insert(result.end(), v[1].begin(), v[1].end());
          result.insert(result.end(), second.begin(), second.end());
          return result;
        });
      }
    }
  }

  // Bytes to the first line of `buffer`.
  static std::size_t aligned(const Buffer& buffer) {
    return (64 - reinterpret_cast<std::uintptr_t>(buffer.data()) % 64) % 64;
  }

  Random random_;
  std::string label_;
};

}  // namespace

int main() {
  Comparison().run();
  std::printf("%016llx\n", static_cast<unsigned long long>(digest));
  return 0;
}

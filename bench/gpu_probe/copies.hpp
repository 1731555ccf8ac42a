// Copies between the GPU's memory and the host's: sections e, h and j; and the cost of calls: g.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "driver.hpp"
#include "flatweights/device_copy_ptx.hpp"
#include "harness.hpp"
#include "pieces.hpp"

namespace probe {

// Bytes of the variables of ResNet-50 that are trained: 161 of them, 102 MB.
inline std::vector<std::size_t> resnet50() {
  std::vector<std::size_t> sizes;
  const auto convolution = [&](std::size_t area, std::size_t from, std::size_t to) {
    for (const std::size_t size : {area * from * to, to, to}) sizes.push_back(4 * size);
  };
  convolution(49, 3, 64);
  std::size_t channels = 64;
  constexpr std::size_t kStages[][2] = {{64, 3}, {128, 4}, {256, 6}, {512, 3}};
  for (const auto& [width, blocks] : kStages) {
    for (std::size_t block = 0; block < blocks; ++block) {
      if (block == 0) convolution(1, channels, 4 * width);
      convolution(1, channels, width);
      convolution(9, width, width);
      convolution(1, width, 4 * width);
      channels = 4 * width;
    }
  }
  sizes.push_back(4 * 2048 * 1000);
  sizes.push_back(4 * 1000);
  return sizes;
}

// Bytes of the variables of a ResNet-20: 99 of them, 1.1 MB.
inline std::vector<std::size_t> resnet20() {
  std::vector<std::size_t> sizes{4 * 27 * 16, 64, 64, 64, 64};
  std::size_t channels = 16;
  for (const std::size_t width : {16, 32, 64}) {
    for (int i = 0; i < 6; ++i) {
      sizes.push_back(4 * 9 * channels * width);
      for (int k = 0; k < 4; ++k) sizes.push_back(4 * width);
      if (i == 1 && width > 16) sizes.push_back(2 * channels * width);
      channels = width;
    }
  }
  sizes.push_back(4 * 640);
  sizes.push_back(40);
  return sizes;
}

// Where the variables are, each by itself, in an allocation; and where in a packed buffer.
struct Model {
  std::vector<std::size_t> sizes, apart, packed;
  std::size_t room = 0;    // bytes of the allocation
  std::size_t nbytes = 0;  // of the packed buffer

  explicit Model(std::vector<std::size_t> bytes) : sizes(std::move(bytes)) {
    for (const std::size_t size : sizes) {
      apart.push_back(room);
      packed.push_back(nbytes);
      room += (size + 1023) / 512 * 512;  // as an allocator would place them
      nbytes += (size + 63) / 64 * 64;
    }
  }

  // Copies of at most `most` bytes each, to the packed buffer or back.
  [[nodiscard]] std::vector<Piece> pieces(CUdeviceptr variables, CUdeviceptr buffer, bool back,
                                          std::size_t most) const {
    std::vector<Piece> all;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      for (std::size_t done = 0; done < sizes[i]; done += most) {
        auto* const there = reinterpret_cast<std::byte*>(variables + apart[i] + done);
        auto* const here = reinterpret_cast<std::byte*>(buffer + packed[i] + done);
        const std::size_t size = std::min(most, sizes[i] - done);
        all.push_back(back ? Piece{here, there, size} : Piece{there, here, size});
      }
    }
    return all;
  }
};

inline CUdeviceptr address(const void* host) {
  return static_cast<CUdeviceptr>(reinterpret_cast<std::uintptr_t>(host));
}

// Seconds on the GPU, and on the host from the call until the event is there.
struct Took {
  double gpu, host;
};

template <class F>
Took took(const Gpu& gpu, int calls, F&& body) {
  const CUevent begin = event(CU_EVENT_DEFAULT), end = event(CU_EVENT_DEFAULT), plain = event();
  std::vector<double> there, here;
  for (int i = 0; i < calls + 2; ++i) {
    CALL(cuEventRecord, begin, gpu.stream());
    body();
    CALL(cuEventRecord, end, gpu.stream());
    CALL(cuEventSynchronize, end);
    float milliseconds = 0;
    CALL(cuEventElapsedTime, &milliseconds, begin, end);
    const double before = now();
    body();
    CALL(cuEventRecord, plain, gpu.stream());
    CALL(cuEventSynchronize, plain);
    const double after = now();
    if (i < 2) continue;
    there.push_back(1e-3 * static_cast<double>(milliseconds));
    here.push_back(after - before);
  }
  return {median(there), median(here)};
}

// A table of pieces in pinned memory, and its copy on the GPU.
struct Tables {
  std::size_t count;
  CUdeviceptr pinned, device;

  Tables(const Gpu& gpu, const std::vector<Piece>& pieces) : count(pieces.size()) {
    const std::size_t nbytes = count * sizeof(Piece);
    void* const memory = gpu.pinned(nbytes);
    std::memcpy(memory, pieces.data(), nbytes);
    pinned = address(memory);
    device = gpu.allocate(nbytes);
    CALL(cuMemcpyHtoD, device, pieces.data(), nbytes);
  }
  void free() const {
    CALL(cuMemFreeHost, reinterpret_cast<void*>(pinned));
    CALL(cuMemFree, device);
  }
};

inline void report_rate(const Report& report, const std::string& name, std::size_t nbytes,
                        const Took& took) {
  report.add(name + ", on the GPU", 1e-9 * static_cast<double>(nbytes) / took.gpu, "GB/s");
  report.add(name + ", until it is there", 1e3 * took.host, "ms");
}

// e. Copies of many variables.
inline void probe_copies(const Report& report) {
  Gpu gpu;
  gpu.warm_up();
  const CUfunction copy = gpu.function(flatweights::kDeviceCopyPtx, "flatweights_copy");
  const Model model(resnet50());
  report.add("variables", static_cast<double>(model.sizes.size()), "");
  report.add("their bytes", 1e-6 * static_cast<double>(model.nbytes), "MB");
  const CUdeviceptr variables = gpu.allocate(model.room), buffer = gpu.allocate(model.nbytes);
  void* const pinned = gpu.pinned(model.nbytes);
  std::memset(pinned, 1, model.nbytes);
  std::vector<unsigned char> ordinary(model.nbytes + 4096, 2);
  auto* const registered = reinterpret_cast<unsigned char*>(
      (reinterpret_cast<std::uintptr_t>(ordinary.data()) + 4095) / 4096 * 4096);
  bool has_registered =
      TRY(cuMemHostRegister, static_cast<void*>(registered), model.nbytes, 0u) == CUDA_SUCCESS;
  CUdeviceptr registered_there = 0;
  if (has_registered)
    CALL(cuMemHostGetDevicePointer, &registered_there, static_cast<void*>(registered), 0u);
  CALL(cuMemsetD8, variables, static_cast<unsigned char>(7), model.room);
  CALL(cuCtxSynchronize);

  const auto run = [&](const std::string& name, CUdeviceptr target, bool back, std::size_t most) {
    const Tables tables(gpu, model.pieces(variables, target, back, most));
    for (const bool on_device : {true, false}) {
      const CUdeviceptr table = on_device ? tables.device : tables.pinned;
      report_rate(report,
                  name + format(", pieces of %zu KiB, table %s", most / 1024,
                                on_device ? "on the GPU" : "pinned"),
                  model.nbytes, took(gpu, 9, [&] {
                    gpu.launch(copy, static_cast<unsigned>(tables.count), 256, table);
                  }));
    }
    tables.free();
  };
  for (const std::size_t most : {4096, 16384, 65536}) run("GPU to GPU", buffer, false, most);
  report_rate(report, "GPU to GPU, cuMemcpyDtoDAsync", model.nbytes, took(gpu, 9, [&] {
                CALL(cuMemcpyDtoDAsync, buffer, variables, model.nbytes, gpu.stream());
              }));
  for (const std::size_t most : {4096, 16384, 65536}) {
    run("GPU to pinned", address(pinned), false, most);
    run("pinned to GPU", address(pinned), true, most);
    if (has_registered && most == 16384) {
      run("GPU to registered", registered_there, false, most);
      run("registered to GPU", registered_there, true, most);
    }
  }
  report_rate(report, "GPU to pinned, cuMemcpyDtoHAsync", model.nbytes, took(gpu, 9, [&] {
                CALL(cuMemcpyDtoHAsync, pinned, variables, model.nbytes, gpu.stream());
              }));
  report_rate(report, "pinned to GPU, cuMemcpyHtoDAsync", model.nbytes, took(gpu, 9, [&] {
                CALL(cuMemcpyHtoDAsync, variables, static_cast<const void*>(pinned), model.nbytes,
                     gpu.stream());
              }));
  if (has_registered)
    report_rate(report, "GPU to registered, cuMemcpyDtoHAsync", model.nbytes, took(gpu, 9, [&] {
                  CALL(cuMemcpyDtoHAsync, static_cast<void*>(registered), variables, model.nbytes,
                       gpu.stream());
                }));

  // Whether the bytes are right, once for each kernel.
  const Model small(resnet20());
  std::vector<unsigned char> values(small.room);
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
  CALL(cuMemcpyHtoD, variables, static_cast<const void*>(values.data()), small.room);
  const auto check = [&](const std::string& name) {
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < small.sizes.size(); ++i)
      wrong += std::memcmp(static_cast<unsigned char*>(pinned) + small.packed[i],
                           values.data() + small.apart[i], small.sizes[i]) != 0
                   ? 1
                   : 0;
    report.add(name + ", wrong variables", static_cast<double>(wrong), "");
    std::memset(pinned, 0, small.nbytes);
  };
  report.add("few bytes: variables", static_cast<double>(small.sizes.size()), "");
  report.add("few bytes: their bytes", 1e-6 * static_cast<double>(small.nbytes), "MB");
  const auto few = [&](const std::string& name, const std::function<void()>& body) {
    try {
      const Took time = took(gpu, 51, body);
      report.add(name + ", on the GPU", 1e6 * time.gpu, "us");
      report.add(name + ", until it is there", 1e6 * time.host, "us");
      check(name);
    } catch (const std::exception& error) {
      report.text(name, error.what());
    }
  };
  for (const std::size_t most : {4096, 16384}) {
    const Tables tables(gpu, small.pieces(variables, address(pinned), false, most));
    for (const bool on_device : {false, true}) {
      const CUdeviceptr table = on_device ? tables.device : tables.pinned;
      few(format("few bytes to pinned, pieces of %zu KiB, table %s", most / 1024,
                 on_device ? "on the GPU" : "pinned"),
          [&] { gpu.launch(copy, static_cast<unsigned>(tables.count), 256, table); });
    }
  }
  const auto by_parameters = [&]<std::size_t Room>(const char* kernel, std::size_t most, unsigned y,
                                                   const Table<Room>*) {
    const std::vector<Piece> pieces = small.pieces(variables, address(pinned), false, most);
    if (pieces.size() > Room) throw std::runtime_error("too many pieces for the parameters");
    static Table<Room> table;
    std::copy(pieces.begin(), pieces.end(), table.pieces);
    const CUfunction function = gpu.own(kernel);
    few(format("few bytes to pinned, table in %zu bytes of parameters, %u blocks a piece",
               sizeof(table), y),
        [&] { gpu.launch2(function, static_cast<unsigned>(pieces.size()), y, 256, table); });
  };
  try {
    for (const unsigned y : {1u, 4u, 16u})
      by_parameters("probe_copy_4k", std::size_t{1} << 30, y,
                    static_cast<const Table<kIn4k>*>(nullptr));
    by_parameters("probe_copy_32k", 4096, 1, static_cast<const Table<kIn32k>*>(nullptr));
  } catch (const std::exception& error) {
    report.text("table in parameters", error.what());
  }
  few("few bytes to pinned, cuMemcpyDtoHAsync of each", [&] {
    for (std::size_t i = 0; i < small.sizes.size(); ++i)
      CALL(cuMemcpyDtoHAsync, static_cast<void*>(static_cast<char*>(pinned) + small.packed[i]),
           variables + small.apart[i], small.sizes[i], gpu.stream());
  });
  std::vector<CUdeviceptr> to, from;
  for (std::size_t i = 0; i < small.sizes.size(); ++i) {
    to.push_back(address(pinned) + small.packed[i]);
    from.push_back(variables + small.apart[i]);
  }
  std::vector<std::size_t> sizes = small.sizes;
  CUmemcpyAttributes attributes{};
  attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  std::size_t first = 0;
  few("few bytes to pinned, cuMemcpyBatchAsync", [&] {
    CALL(cuMemcpyBatchAsync, to.data(), from.data(), sizes.data(), sizes.size(), &attributes,
         &first, std::size_t{1}, gpu.stream());
  });
  const Took one = took(
      gpu, 51, [&] { CALL(cuMemcpyDtoHAsync, pinned, variables, small.nbytes, gpu.stream()); });
  report.add("few bytes to pinned, one cuMemcpyDtoHAsync, until it is there", 1e6 * one.host, "us");
  report.add("few bytes to pinned, one cuMemcpyDtoH",
             1e6 * time_of(51, [&] { CALL(cuMemcpyDtoH, pinned, variables, small.nbytes); }), "us");
  const Took there = took(gpu, 51, [&] {
    CALL(cuMemcpyHtoDAsync, variables, static_cast<const void*>(pinned), small.nbytes,
         gpu.stream());
  });
  report.add("few bytes from pinned, one cuMemcpyHtoDAsync, until it is there", 1e6 * there.host,
             "us");
}

// g. Microseconds of calls.
inline void probe_calls(const Report& report) {
  Gpu gpu;
  gpu.warm_up();
  const CUfunction spin = gpu.own("probe_spin");
  const CUdeviceptr memory = gpu.allocate(1 << 20);
  void* const pinned = gpu.pinned(1 << 20);
  std::vector<char> ordinary(4096);
  const auto each = [&](const std::string& name, int calls, const std::function<void()>& body) {
    try {
      for (int i = 0; i < calls / 10; ++i) body();
      std::vector<double> rounds;
      for (int round = 0; round < 5; ++round) {
        const double begin = now();
        for (int i = 0; i < calls; ++i) body();
        rounds.push_back((now() - begin) / calls);
        TRY(cuStreamSynchronize, gpu.stream());
      }
      report.add(name, 1e6 * median(rounds), "us");
    } catch (const std::exception& error) {
      report.text(name, error.what());
    }
  };
  each("an empty call, for comparison", 2000, [] {});
  const auto type_of = [](CUdeviceptr pointer) {
    unsigned type = 0;
    TRY(cuPointerGetAttribute, static_cast<void*>(&type), CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        pointer);
  };
  each("cuPointerGetAttribute, memory type, the GPU's", 2000, [&] { type_of(memory + 4096); });
  each("cuPointerGetAttribute, memory type, pinned", 2000, [&] { type_of(address(pinned)); });
  each("cuPointerGetAttribute, memory type, ordinary", 2000,
       [&] { type_of(address(ordinary.data())); });
  each("cuPointerGetAttribute, context, the GPU's", 2000, [&] {
    CUcontext context = nullptr;
    TRY(cuPointerGetAttribute, static_cast<void*>(&context), CU_POINTER_ATTRIBUTE_CONTEXT, memory);
  });
  for (const unsigned count : {3u, 4u}) {
    each(format("cuPointerGetAttributes of %u", count), 2000, [&] {
      CUpointer_attribute which[] = {
          CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
          CU_POINTER_ATTRIBUTE_RANGE_SIZE, CU_POINTER_ATTRIBUTE_BUFFER_ID};
      unsigned type = 0;
      CUdeviceptr begin = 0;
      std::size_t size = 0;
      unsigned long long id = 0;
      void* values[] = {&type, &begin, &size, &id};
      CALL(cuPointerGetAttributes, count, which, values, memory);
    });
  }
  each("cuCtxPushCurrent and cuCtxPopCurrent", 2000, [&] {
    CUcontext popped = nullptr;
    CALL(cuCtxPushCurrent, gpu.context());
    CALL(cuCtxPopCurrent, &popped);
  });
  each("cuStreamGetCtx", 2000, [&] {
    CUcontext context = nullptr;
    CALL(cuStreamGetCtx, gpu.stream(), &context);
  });
  const CUevent done = event();
  each("cuLaunchKernel, empty kernel, queued", 500, [&] { gpu.launch(spin, 1, 32, 0LL); });
  each("cuEventRecord", 500, [&] { CALL(cuEventRecord, done, gpu.stream()); });
  gpu.wait();
  each("cuEventSynchronize of an event that is there", 2000,
       [&] { CALL(cuEventSynchronize, done); });
  each("cuEventQuery of an event that is there", 2000, [&] { CALL(cuEventQuery, done); });
  each("cuStreamSynchronize of an idle stream", 2000, [&] { gpu.wait(); });
  each("cuCtxSynchronize of an idle context", 1000, [&] { CALL(cuCtxSynchronize); });
  each("empty kernel, event, cuEventSynchronize", 200, [&] {
    gpu.launch(spin, 1, 32, 0LL);
    CALL(cuEventRecord, done, gpu.stream());
    CALL(cuEventSynchronize, done);
  });
  each("cuMemGetInfo", 200, [&] { static_cast<void>(gpu.free_memory()); });
}

// A file in memory, mapped.
struct Segment {
  int fd = -1;
  std::size_t nbytes;
  void* memory = nullptr;

  explicit Segment(std::size_t size) : nbytes(size) {
    fd = memfd_create("probe", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0)
      throw std::runtime_error("memfd_create");
    memory = map(PROT_READ | PROT_WRITE);
    std::memset(memory, 3, size);
  }
  [[nodiscard]] void* map(int access) const {
    void* const mapped = mmap(nullptr, nbytes, access, MAP_SHARED, fd, 0);
    if (mapped == MAP_FAILED) throw std::runtime_error("mmap");
    return mapped;
  }
};

inline void rates_of(const Report& report, const std::string& name, const Gpu& gpu, CUfunction copy,
                     CUdeviceptr memory, void* host, std::size_t nbytes, bool writable) {
  CUdeviceptr there = 0;
  CALL(cuMemHostGetDevicePointer, &there, host, 0u);
  report.text(name + ", address on the GPU", there == address(host) ? "the same" : "another");
  const auto run = [&](const std::string& what, CUdeviceptr from, CUdeviceptr to) {
    std::vector<Piece> pieces;
    for (std::size_t done = 0; done < nbytes; done += 16384)
      pieces.push_back({reinterpret_cast<const void*>(from + done),
                        reinterpret_cast<void*>(to + done),
                        std::min<std::size_t>(16384, nbytes - done)});
    const Tables tables(gpu, pieces);
    report_rate(report, name + what, nbytes, took(gpu, 7, [&] {
                  gpu.launch(copy, static_cast<unsigned>(tables.count), 256, tables.device);
                }));
    tables.free();
  };
  run(", kernel to the GPU", there, memory);
  if (writable) run(", kernel from the GPU", memory, there);
  report_rate(report, name + ", cuMemcpyHtoDAsync", nbytes, took(gpu, 7, [&] {
                CALL(cuMemcpyHtoDAsync, memory, static_cast<const void*>(host), nbytes,
                     gpu.stream());
              }));
  if (writable)
    report_rate(report, name + ", cuMemcpyDtoHAsync", nbytes,
                took(gpu, 7, [&] { CALL(cuMemcpyDtoHAsync, host, memory, nbytes, gpu.stream()); }));
}

// h. Segments of the host that the GPU reaches.
inline void probe_registers(const Report& report) {
  constexpr unsigned kReadOnly = 0x08;  // CU_MEMHOSTREGISTER_READ_ONLY
  constexpr unsigned kBoth = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  const Segment large(std::size_t{100} << 20);
  // Another process that registers the same segment, before this one calls the driver.
  auto [here, there] = Channel::pair();
  const Channel end = there;
  const pid_t other = start([&] {
    end.receive(60);
    Message reply{'r'};
    try {
      Gpu gpu;
      void* const mapped = large.map(PROT_READ | PROT_WRITE);
      const double begin = now();
      const CUresult result = TRY(cuMemHostRegister, mapped, large.nbytes, kBoth);
      reply.value[0] = now() - begin;
      const CUdeviceptr memory = gpu.allocate(large.nbytes);
      if (result == CUDA_SUCCESS) {
        CALL(cuMemcpyHtoDAsync, memory, static_cast<const void*>(mapped), large.nbytes,
             gpu.stream());
        gpu.wait();
      }
      std::snprintf(reply.text, sizeof(reply.text), "%s", name_of(result).c_str());
    } catch (const std::exception& error) {
      std::snprintf(reply.text, sizeof(reply.text), "%s", error.what());
    }
    end.send(reply);
    end.receive(60);
  });
  auto [here2, there2] = Channel::pair();
  const Channel end2 = there2;
  const pid_t careless = start([&] {
    end2.receive(60);
    Message reply{'r'};
    try {
      Gpu gpu;
      const Segment segment(std::size_t{2} << 20);
      CALL(cuMemHostRegister, segment.memory, segment.nbytes, kBoth);
      munmap(segment.memory, segment.nbytes);
      std::string text = "cuCtxSynchronize: " + name_of(TRY(cuCtxSynchronize));
      void* const again = mmap(segment.memory, segment.nbytes, PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_FIXED, segment.fd, 0);
      text += "; registered again at the same address: " +
              name_of(TRY(cuMemHostRegister, again, segment.nbytes, kBoth));
      text += "; unregistered: " + name_of(TRY(cuMemHostUnregister, again));
      std::snprintf(reply.text, sizeof(reply.text), "%s", text.c_str());
    } catch (const std::exception& error) {
      std::snprintf(reply.text, sizeof(reply.text), "%s", error.what());
    }
    end2.send(reply);
  });

  Gpu gpu;
  gpu.warm_up();
  const CUfunction copy = gpu.function(flatweights::kDeviceCopyPtx, "flatweights_copy");
  const CUdeviceptr memory = gpu.allocate(large.nbytes);
  const Segment small(std::size_t{2} << 20);
  for (const Segment* segment : {&small, &large}) {
    const std::string size = segment == &small ? "2 MiB" : "104.9 MB";
    std::vector<double> on, off, allocate, release;
    for (int i = 0; i < 5; ++i) {
      double begin = now();
      CALL(cuMemHostRegister, segment->memory, segment->nbytes, kBoth);
      on.push_back(now() - begin);
      begin = now();
      CALL(cuMemHostUnregister, segment->memory);
      off.push_back(now() - begin);
      begin = now();
      void* const pinned = gpu.pinned(segment->nbytes);
      allocate.push_back(now() - begin);
      begin = now();
      CALL(cuMemFreeHost, pinned);
      release.push_back(now() - begin);
    }
    report.add("memfd of " + size + ", cuMemHostRegister", 1e6 * median(on), "us");
    report.add("memfd of " + size + ", cuMemHostUnregister", 1e6 * median(off), "us");
    report.add(size + ", cuMemHostAlloc", 1e6 * median(allocate), "us");
    report.add(size + ", cuMemFreeHost", 1e6 * median(release), "us");
  }
  CALL(cuMemHostRegister, large.memory, large.nbytes, kBoth);
  rates_of(report, "memfd", gpu, copy, memory, large.memory, large.nbytes, true);
  here.send({'b'});
  const Message reply = here.receive(20);
  report.text("the same memfd, registered in another process meanwhile", reply.text);
  report.add("registered in another process", 1e6 * reply.value[0], "us");
  CALL(cuMemHostUnregister, large.memory);
  here.send({'q'});

  const auto attempt_of = [&](const std::string& name, unsigned flags) {
    void* const mapped = large.map(PROT_READ);
    const CUresult result = TRY(cuMemHostRegister, mapped, large.nbytes, flags);
    report.text(name, name_of(result));
    if (result == CUDA_SUCCESS) {
      try {
        rates_of(report, name, gpu, copy, memory, mapped, large.nbytes, false);
      } catch (const std::exception& error) {
        report.text(name + ", copies", error.what());
      }
      TRY(cuMemHostUnregister, mapped);
    }
    munmap(mapped, large.nbytes);
  };
  attempt_of("map to read, registered with READ_ONLY", kBoth | kReadOnly);
  attempt_of("map to read, registered without READ_ONLY", kBoth);
  here2.send({'b'});
  try {
    report.text("unmapped without being unregistered", here2.receive(20).text);
  } catch (const std::exception& error) {
    report.text("unmapped without being unregistered", error.what());
  }
  finish(other, 5);
  finish(careless, 5);
}

// Threads that are awake when they are called.
class WarmThreads {
 public:
  explicit WarmThreads(unsigned count) : count_(count) {
    for (unsigned i = 1; i < count; ++i)
      threads_.emplace_back([this, i] {
        for (unsigned seen = 0;;) {
          while (job_.load(std::memory_order_acquire) == seen) {
          }
          ++seen;
          if (stop_.load()) return;
          (*body_)(i);
          left_.fetch_sub(1, std::memory_order_release);
        }
      });
  }
  ~WarmThreads() {
    stop_.store(true);
    job_.fetch_add(1);
    for (std::thread& thread : threads_) thread.join();
  }
  WarmThreads(const WarmThreads&) = delete;
  WarmThreads& operator=(const WarmThreads&) = delete;

  void run(const std::function<void(unsigned)>& body) {
    body_ = &body;
    left_.store(count_ - 1);
    job_.fetch_add(1, std::memory_order_release);
    body(0);
    while (left_.load(std::memory_order_acquire) != 0) {
    }
  }

 private:
  unsigned count_;
  const std::function<void(unsigned)>* body_ = nullptr;
  std::atomic<unsigned> job_{0}, left_{0};
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// j. Copies in the host's memory, of ordinary, pinned and registered memory.
inline void probe_host(const Report& report) {
  const std::size_t nbytes = std::size_t{100} << 20;
  std::vector<char> to(nbytes, 1), from(nbytes, 2);
  const auto rates = [&](const std::string& name, const char* source) {
    for (const std::size_t size : {std::size_t{1'200'000}, nbytes}) {
      for (const unsigned count : {1u, 2u, 4u, 8u}) {
        if (count > std::thread::hardware_concurrency()) continue;
        WarmThreads threads(count);
        const std::size_t share = size / count / 64 * 64;
        const std::function<void(unsigned)> body = [&](unsigned i) {
          const std::size_t begin = i * share;
          std::memcpy(to.data() + begin, source + begin, i + 1 == count ? size - begin : share);
        };
        threads.run(body);
        const double seconds = time_of(size == nbytes ? 9 : 101, [&] { threads.run(body); });
        report.add(
            name + format(" of %.1f MB, %u threads", 1e-6 * static_cast<double>(size), count),
            1e-9 * static_cast<double>(size) / seconds, "GB/s");
      }
    }
  };
  report.add("processors", std::thread::hardware_concurrency(), "");
  rates("memcpy from ordinary memory", from.data());
  Gpu gpu;
  auto* const pinned = static_cast<char*>(gpu.pinned(nbytes));
  std::memset(pinned, 3, nbytes);
  rates("memcpy from pinned memory", pinned);
  const CUdeviceptr memory = gpu.allocate(nbytes);
  // Bytes that the GPU has just written are in no processor's cache.
  for (const std::size_t size : {std::size_t{1'200'000}, nbytes}) {
    std::vector<double> times;
    for (int i = 0; i < 9; ++i) {
      CALL(cuMemcpyDtoH, static_cast<void*>(pinned), memory, size);
      const double begin = now();
      std::memcpy(to.data(), pinned, size);
      times.push_back(now() - begin);
    }
    report.add(format("memcpy of %.1f MB that the GPU has just written, 1 thread",
                      1e-6 * static_cast<double>(size)),
               1e-9 * static_cast<double>(size) / median(times), "GB/s");
  }
  const Segment segment(nbytes);
  CALL(cuMemHostRegister, segment.memory, segment.nbytes, 0u);
  rates("memcpy from a registered memfd", static_cast<const char*>(segment.memory));
  CALL(cuMemHostUnregister, segment.memory);
}

}  // namespace probe

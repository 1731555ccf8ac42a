// Memory that processes share by descriptors: sections b, c and i.
//
// The section's own process stands for the hub: it never calls the driver, holds descriptors and
// sends the other processes commands, one letter each (see Role::answer).
#pragma once

#include <memory>

#include "driver.hpp"
#include "harness.hpp"

namespace probe {

inline constexpr std::size_t kSmall = std::size_t{2} << 20;
inline constexpr std::size_t kLarge = std::size_t{100} << 20;  // 104.9 MB
inline constexpr std::uint32_t kSeed = 12345;
inline constexpr std::uint32_t kWritten = 1u << 20;  // words that probe_write writes

inline CUmemAllocationProp segment_properties(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

// A process that creates segments, or maps those of others.
class Role {
 public:
  explicit Role(Channel channel) : channel_(channel) {}

  void serve() {
    for (;;) {
      int descriptor = -1;
      const Message request = channel_.receive(600, &descriptor);
      if (request.what == 'q') return;
      Message reply;
      reply.what = request.what;
      int sent = -1;
      try {
        sent = answer(request, descriptor, reply);
      } catch (const std::exception& error) {
        reply.what = '!';
        std::snprintf(reply.text, sizeof(reply.text), "%s", error.what());
      }
      channel_.send(reply, sent);
      if (sent >= 0) close(sent);
      if (descriptor >= 0) close(descriptor);
    }
  }

 private:
  // Does what `request` wants, and returns a descriptor to send, or -1.
  int answer(const Message& request, int descriptor, Message& reply) {
    const double begin = now();
    switch (request.what) {
      case 'n':  // the driver, without a context
        device_ = first_device();
        break;
      case 'g':  // a context
        gpu_ = std::make_unique<Gpu>();
        device_ = gpu_->device();
        gpu_->own("probe_fill");  // takes memory, too
        break;
      case 'c': {  // create value[0] bytes
        nbytes_ = static_cast<std::size_t>(request.value[0]);
        const CUmemAllocationProp properties = segment_properties(device_);
        CALL(cuMemCreate, &handle_, nbytes_, &properties, 0ull);
        reply.value[0] = now() - begin;
        int exported = -1;
        CALL(cuMemExportToShareableHandle, &exported, handle_,
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
        reply.value[1] = now() - begin - reply.value[0];
        return exported;
      }
      case 'i':  // import value[0] bytes
        nbytes_ = static_cast<std::size_t>(request.value[0]);
        CALL(cuMemImportFromShareableHandle, &handle_,
             reinterpret_cast<void*>(static_cast<std::intptr_t>(descriptor)),
             CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        reply.value[0] = now() - begin;
        break;
      case 'm':  // map with the access value[0]: 1 to read, 3 to write, too
        map(static_cast<CUmemAccess_flags>(static_cast<int>(request.value[0])), reply.value);
        break;
      case 'u':  // unmap and release
        unmap(reply.value);
        break;
      case 'f':  // fill
        gpu_->launch(gpu_->own("probe_fill"), 1024, 256, address_, words(), kSeed);
        gpu_->wait();
        break;
      case 'v':  // count the wrong words from word value[0] on
        reply.value[0] = wrong_words(static_cast<std::uint32_t>(request.value[0]));
        break;
      case 'k':  // write for value[0] seconds; do not wait
        gpu_->launch(gpu_->own("probe_write"), 1, 256, address_, kWritten,
                     gpu_->cycles(request.value[0]));
        break;
      case 'p':  // look at the counter for value[0] seconds
        poll(request.value[0], reply.value);
        break;
      case 'F':  // free memory
        reply.value[0] = static_cast<double>(gpu_->free_memory());
        break;
      case 'W':  // wait until value[0] bytes are free, for at most value[1] seconds
        while (now() - begin < request.value[1]) {
          reply.value[1] = static_cast<double>(gpu_->free_memory());
          if (reply.value[1] >= request.value[0]) break;
          sleep_for(1e-3);
        }
        reply.value[0] = now();
        break;
      case 'w': {  // write through the map, which may not be allowed
        gpu_->launch(gpu_->own("probe_poke"), 1, 32, address_);
        const CUresult result = TRY(cuStreamSynchronize, gpu_->stream());
        reply.value[0] = result;
        std::snprintf(reply.text, sizeof(reply.text), "%s", name_of(result).c_str());
        break;
      }
      default:
        throw std::runtime_error("no such command");
    }
    reply.value[5] = now() - begin;
    return -1;
  }

  void map(CUmemAccess_flags access, double* seconds) {
    double begin = now();
    const auto lap = [&begin] {
      const double end = now();
      const double took = end - begin;
      begin = end;
      return took;
    };
    CALL(cuMemAddressReserve, &address_, nbytes_, std::size_t{0}, CUdeviceptr{0}, 0ull);
    seconds[0] = lap();
    CALL(cuMemMap, address_, nbytes_, std::size_t{0}, handle_, 0ull);
    seconds[1] = lap();
    CUmemAccessDesc description{};
    description.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    description.location.id = device_;
    description.flags = access;
    CALL(cuMemSetAccess, address_, nbytes_, &description, std::size_t{1});
    seconds[2] = lap();
  }

  void unmap(double* seconds) {
    const double begin = now();
    if (address_ != 0) {
      CALL(cuMemUnmap, address_, nbytes_);
      seconds[0] = now() - begin;
      CALL(cuMemAddressFree, address_, nbytes_);
      address_ = 0;
    }
    const double between = now();
    CALL(cuMemRelease, handle_);
    seconds[1] = now() - between;
  }

  [[nodiscard]] std::uint32_t words() const { return static_cast<std::uint32_t>(nbytes_ / 4); }

  std::uint32_t wrong_words(std::uint32_t first) {
    const CUdeviceptr wrong = gpu_->allocate(4);
    CALL(cuMemsetD8, wrong, static_cast<unsigned char>(0), std::size_t{4});
    CALL(cuCtxSynchronize);
    gpu_->launch(gpu_->own("probe_check"), 1024, 256, address_, first, words(), kSeed, wrong);
    gpu_->wait();
    std::uint32_t count = 0;
    CALL(cuMemcpyDtoH, &count, wrong, std::size_t{4});
    CALL(cuMemFree, wrong);
    return count;
  }

  // When the counter changed last; it, before and after; how often it was read, and the longest
  // time that one read took.
  void poll(double seconds, double* found) {
    const double begin = now();
    std::uint32_t last = 0;
    CALL(cuMemcpyDtoH, &last, address_, std::size_t{4});
    found[1] = last;
    found[0] = 0;
    while (now() - begin < seconds) {
      const double before = now();
      std::uint32_t value = 0;
      CALL(cuMemcpyDtoH, &value, address_, std::size_t{4});
      const double after = now();
      if (value != last) found[0] = after;
      last = value;
      found[3] += 1;
      found[4] = std::max(found[4], after - before);
      sleep_for(2e-4);
    }
    found[2] = last;
  }

  Channel channel_;
  CUdevice device_ = 0;
  std::unique_ptr<Gpu> gpu_;
  std::size_t nbytes_ = 0;
  CUmemGenericAllocationHandle handle_ = 0;
  CUdeviceptr address_ = 0;
};

// The hub's end of a Role.
class Worker {
 public:
  explicit Worker(std::vector<Worker*>& all) {
    auto [here, there] = Channel::pair();
    channel_ = here;
    const Channel mine = there;
    pid_ = start([&] {
      // Only the hub and the process itself hold the ends of its sockets.
      channel_.close();
      for (Worker* other : all) other->channel_.close();
      Role(mine).serve();
    });
    there.close();
    all.push_back(this);
  }

  void post(char what, double first = 0, double second = 0, int descriptor = -1) const {
    Message request;
    request.what = what;
    request.value[0] = first;
    request.value[1] = second;
    channel_.send(request, descriptor);
  }
  Message take(int* descriptor = nullptr) const {
    const Message reply = channel_.receive(20, descriptor);
    if (reply.what == '!') throw std::runtime_error(reply.text);
    return reply;
  }
  Message ask(char what, double first = 0, double second = 0, int descriptor = -1,
              int* received = nullptr) const {
    post(what, first, second, descriptor);
    return take(received);
  }
  // The same, but with an error's text instead of an exception.
  std::string outcome(char what, double first = 0, double second = 0, int descriptor = -1) const {
    try {
      ask(what, first, second, descriptor);
      return "ok";
    } catch (const std::exception& error) {
      return error.what();
    }
  }

  [[nodiscard]] pid_t pid() const { return pid_; }
  [[nodiscard]] int fd() const { return channel_.fd(); }
  void stop() {
    try {
      post('q');
    } catch (const std::exception&) {
    }
    finish(pid_, 5);
  }

 private:
  Channel channel_;
  pid_t pid_;
};

inline void time_segments(const Report& report, const Worker& creator, const Worker& importer,
                          std::size_t nbytes, const std::string& size, int rounds) {
  std::map<std::string, std::vector<double>> times;
  const auto map_all = [&](const Worker& worker, const std::string& who, int access) {
    const Message mapped = worker.ask('m', access);
    times[who + ", cuMemAddressReserve"].push_back(mapped.value[0]);
    times[who + ", cuMemMap"].push_back(mapped.value[1]);
    times[who + (access == 1 ? ", cuMemSetAccess to read" : ", cuMemSetAccess to read and write")]
        .push_back(mapped.value[2]);
  };
  for (int i = 0; i < rounds; ++i) {
    int segment = -1;
    const Message made = creator.ask('c', static_cast<double>(nbytes), 0, -1, &segment);
    times["creator, cuMemCreate"].push_back(made.value[0]);
    times["creator, cuMemExportToShareableHandle"].push_back(made.value[1]);
    map_all(creator, "creator", 3);
    creator.ask('f');
    for (const int access : {1, 3}) {
      const Message imported = importer.ask('i', static_cast<double>(nbytes), 0, segment);
      times["importer, cuMemImportFromShareableHandle"].push_back(imported.value[0]);
      map_all(importer, "importer", access);
      const Message checked = importer.ask('v');
      if (i == 0)
        report.add(size + (access == 1 ? ", wrong words read" : ", wrong words read, writable map"),
                   checked.value[0], "words");
      const Message left = importer.ask('u');
      times["importer, cuMemUnmap"].push_back(left.value[0]);
      times["importer, cuMemRelease"].push_back(left.value[1]);
    }
    const Message left = creator.ask('u');
    times["creator, cuMemUnmap"].push_back(left.value[0]);
    times["creator, cuMemRelease"].push_back(left.value[1]);
    close(segment);
  }
  for (const auto& [name, values] : times)
    report.add(size + ", " + name, 1e6 * median(values), "us");
}

// b. What shared memory of the GPU costs, and whether a process without a context may hold it.
inline void probe_segments(const Report& report) {
  std::vector<Worker*> all;
  Worker creator(all), importer(all), bare(all);
  report.add("cuInit", 1e3 * creator.ask('n').value[5], "ms");
  int early = -1;
  try {
    creator.ask('c', kSmall, 0, -1, &early);
    report.text("cuMemCreate and export before there is a context", "ok");
  } catch (const std::exception& error) {
    report.text("cuMemCreate and export before there is a context", error.what());
  }
  if (early >= 0) {
    report.text("map and access before there is a context", creator.outcome('m', 3));
    report.text("unmap and release before there is a context", creator.outcome('u'));
    bare.ask('n');
    report.text("import without a context", bare.outcome('i', kSmall, 0, early));
    report.text("map to read without a context", bare.outcome('m', 1));
    report.text("unmap and release without a context", bare.outcome('u'));
    close(early);
  }
  report.add("a context, after cuInit", 1e3 * creator.ask('g').value[5], "ms");
  report.add("cuInit and a context", 1e3 * importer.ask('g').value[5], "ms");
  time_segments(report, creator, importer, kSmall, "2 MiB", 9);
  time_segments(report, creator, importer, kLarge, "104.9 MB", 5);
  report.text("the hub, without a driver, forwards descriptors", "ok");
  for (Worker* worker : all) worker->stop();
}

// The life of one segment whose creator is killed: while it is idle, or while it writes.
inline void kill_creator(const Report& report, bool writing) {
  const std::string label = writing ? "killed while it writes: " : "killed idle: ";
  std::vector<Worker*> all;
  Worker creator(all), importer(all), late(all);
  importer.ask('g');
  late.ask('g');
  const double before = importer.ask('F').value[0];
  creator.ask('g');
  const double with_context = importer.ask('F').value[0];
  report.add(label + "memory of the creator's context", 1e-6 * (before - with_context), "MB");
  int segment = -1;
  creator.ask('c', kLarge, 0, -1, &segment);
  creator.ask('m', 3);
  creator.ask('f');
  importer.ask('i', kLarge, 0, segment);
  importer.ask('m', 1);
  report.add(label + "wrong words before", importer.ask('v').value[0], "words");
  if (writing) {
    const Message quick = importer.ask('p', 0.05);
    report.add(label + "time of a 4-byte read by the importer, longest", 1e6 * quick.value[4],
               "us");
    creator.ask('k', 2.0);
    importer.post('p', 4.0);
    sleep_for(0.4);
  }
  const double killed = now();
  kill(creator.pid(), SIGKILL);
  const bool closed = creator.fd() >= 0 && Channel(creator.fd()).has_message(10);
  report.add(label + (closed ? "until its socket was closed" : "its socket was NOT closed in"),
             1e3 * (now() - killed), "ms");
  finish(creator.pid(), 10);
  report.add(label + "until it was gone (waitpid)", 1e3 * (now() - killed), "ms");
  if (writing) {
    const Message seen = importer.take();
    report.add(label + "last write that was seen, after the kill", 1e3 * (seen.value[0] - killed),
               "ms");
    report.add(label + "counter at first", seen.value[1], "");
    report.add(label + "counter at last", seen.value[2], "");
    report.add(label + "reads of the counter", seen.value[3], "");
    report.add(label + "longest of these reads", 1e3 * seen.value[4], "ms");
  }
  const double untouched = writing ? 256 + kWritten : 0;
  report.add(label + "wrong words afterwards (of those never written)",
             importer.ask('v', untouched).value[0], "words");
  const double after = importer.ask('F').value[0];
  report.add(label + "memory that came back at once", 1e-6 * (after - (with_context - kLarge)),
             "MB");
  const std::string imported = late.outcome('i', kLarge, 0, segment);
  report.text(label + "import of the hub's descriptor afterwards", imported);
  if (imported == "ok") {
    report.text(label + "map of it", late.outcome('m', 1));
    report.add(label + "wrong words in it", late.ask('v', untouched).value[0], "words");
  }
  const auto free_after = [&](const std::string& what, const std::function<void()>& action) {
    action();
    report.add(label + "free memory, against before, after " + what,
               1e-6 * (importer.ask('F').value[0] - before), "MB");
  };
  free_after("the kill", [] {});
  free_after("the importer let go", [&] { importer.ask('u'); });
  if (imported == "ok") free_after("the late importer let go", [&] { late.ask('u'); });
  const double closing = now();
  close(segment);
  const Message back = importer.ask('W', before - 16e6, 5);
  report.add(label + "until all memory was back, after the hub closed the last descriptor",
             1e3 * (back.value[0] - closing), "ms");
  report.add(label + "free memory, against before, at the end", 1e-6 * (back.value[1] - before),
             "MB");
  importer.stop();
  late.stop();
}

// c. A creator is killed.
inline void probe_kills(const Report& report) {
  for (const bool writing : {false, true}) {
    try {
      kill_creator(report, writing);
    } catch (const std::exception& error) {
      report.text(writing ? "killed while it writes: STOPPED" : "killed idle: STOPPED",
                  error.what());
    }
  }
}

// i. A write through a map for reading harms the writer alone.
inline void probe_poison(const Report& report) {
  std::vector<Worker*> all;
  Worker creator(all), reader(all), writer(all);
  for (Worker* worker : all) worker->ask('g');
  int segment = -1;
  creator.ask('c', kLarge, 0, -1, &segment);
  creator.ask('m', 3);
  creator.ask('f');
  for (Worker* worker : {&reader, &writer}) {
    worker->ask('i', kLarge, 0, segment);
    worker->ask('m', 1);
    report.add("wrong words before", worker->ask('v').value[0], "words");
  }
  const auto state = [&](const char* who, const Worker& worker) {
    try {
      report.add(std::string(who) + ": wrong words afterwards", worker.ask('v').value[0], "words");
    } catch (const std::exception& error) {
      report.text(std::string(who) + ": after the write", error.what());
    }
  };
  report.text("result of the forbidden write", writer.ask('w').text);
  state("the writer", writer);
  state("the creator", creator);
  state("another reader", reader);
  report.text("the creator's own write afterwards", creator.outcome('f'));
  writer.stop();
  state("the creator, after the writer's end", creator);
  state("another reader, after the writer's end", reader);
  creator.stop();
  reader.stop();
  close(segment);
}

}  // namespace probe

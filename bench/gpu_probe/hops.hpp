// Two processes that take turns on the GPU: section d.
#pragma once

#include "driver.hpp"
#include "harness.hpp"

namespace probe {

enum class Wait : int { kNone, kBlockingEvent, kEvent, kQuery, kStream, kEnd };

struct Plan {
  Wait wait;
  bool spin;      // on the word, instead of sleeping
  double kernel;  // seconds
  double seconds;
};

struct Turns {
  alignas(64) Word word{0};
  alignas(64) std::atomic<bool> stop{false};
};

// One of two processes: launches a kernel when it is its turn, waits for it, and passes the turn.
class Side {
 public:
  Side(Turns& turns, std::uint32_t number) : turns_(turns), number_(number) {
    spin_ = gpu_.own("probe_spin");
    gpu_.warm_up();
    blocking_ = event(CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    plain_ = event();
  }

  // The median and 90 % quantile of the seconds of two hops, on side 0, and how many there were.
  void play(const Plan& plan, double* found) {
    std::vector<double> times;
    const double begin = now();
    double last = begin;
    for (std::uint32_t round = 0;; ++round) {
      const std::uint32_t turn = 2 * round + number_;
      while (turns_.word.load() != turn && !turns_.stop.load()) {
        const std::uint32_t seen = turns_.word.load();
        if (!plan.spin && seen != turn) futex_wait(turns_.word, seen);
        if (now() - begin > plan.seconds + 5) throw std::runtime_error("the other side is silent");
      }
      if (turns_.stop.load()) break;
      if (number_ == 0 && (now() - begin > plan.seconds || round == 2000)) {
        turns_.stop.store(true);
        turns_.word.store(turn + 1);
        futex_wake(turns_.word);
        break;
      }
      work(plan);
      if (number_ == 0) {
        const double at = now();
        if (round > 4) times.push_back(at - last);
        last = at;
      }
      turns_.word.store(turn + 1);
      futex_wake(turns_.word);
    }
    found[0] = median(times);
    found[1] = quantile(times, 0.9);
    found[2] = static_cast<double>(times.size());
  }

 private:
  void work(const Plan& plan) {
    if (plan.wait == Wait::kNone) return;
    gpu_.launch(spin_, 1, 32, gpu_.cycles(plan.kernel));
    const CUevent used = plan.wait == Wait::kBlockingEvent ? blocking_ : plain_;
    if (plan.wait != Wait::kStream) CALL(cuEventRecord, used, gpu_.stream());
    if (plan.wait == Wait::kStream) {
      gpu_.wait();
    } else if (plan.wait == Wait::kQuery) {
      CUresult result = CUDA_ERROR_NOT_READY;
      while ((result = TRY(cuEventQuery, used)) == CUDA_ERROR_NOT_READY) {
      }
      if (result != CUDA_SUCCESS) throw CudaError("cuEventQuery", result);
    } else {
      CALL(cuEventSynchronize, used);
    }
  }

  Turns& turns_;
  std::uint32_t number_;
  Gpu gpu_;
  CUfunction spin_;
  CUevent blocking_, plain_;
};

// A process that keeps the GPU busy with kernels of value[0] seconds, back to back.
inline void keep_busy(const Channel& channel) {
  Gpu gpu;
  const CUfunction spin = gpu.own("probe_spin");
  const auto blocks =
      static_cast<unsigned>(attribute(gpu.device(), CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT));
  std::vector<CUevent> events;
  for (int i = 0; i < 4; ++i) events.push_back(event());
  channel.send({'r'});
  double seconds = 0;
  for (std::size_t i = 0;; ++i) {
    while (channel.has_message(seconds == 0 ? 600 : 0)) {
      const Message message = channel.receive(1);
      if (message.what == 'q') return;
      seconds = message.value[0];
      if (seconds == 0) gpu.wait();
      channel.send({'r'});
    }
    if (i >= events.size()) CALL(cuEventSynchronize, events[i % events.size()]);
    gpu.launch(spin, blocks, 256, gpu.cycles(seconds));
    CALL(cuEventRecord, events[i % events.size()], gpu.stream());
  }
}

// Runs `body`, and sends the other end what it throws.
inline void serve(const Channel& channel, const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
    Message message{'!'};
    std::snprintf(message.text, sizeof(message.text), "%s", error.what());
    channel.send(message);
  }
}

inline Message take(const Channel& channel, double seconds) {
  const Message message = channel.receive(seconds);
  if (message.what == '!') throw std::runtime_error(message.text);
  return message;
}

// d. How long a hop from process to process takes.
inline void probe_hops(const Report& report) {
  auto* const turns = shared_memory<Turns>();
  Channel sides[2], ends[3];
  std::vector<pid_t> children;
  for (std::uint32_t number = 0; number < 2; ++number) {
    auto [here, there] = Channel::pair();
    sides[number] = here;
    ends[number] = there;
    children.push_back(start([&, number] {
      const Channel channel = ends[number];
      serve(channel, [&] {
        Side side(*turns, number);
        channel.send({'r'});
        for (;;) {
          const Message message = channel.receive(600);
          if (message.what == 'q') return;
          const Plan plan{static_cast<Wait>(static_cast<int>(message.value[0])),
                          message.value[1] != 0, message.value[2], message.value[3]};
          Message reply{'r'};
          side.play(plan, reply.value);
          channel.send(reply);
        }
      });
    }));
  }
  auto [busy, busy_end] = Channel::pair();
  const Channel& busy_there = busy_end;
  children.push_back(start([&] { serve(busy_there, [&] { keep_busy(busy_there); }); }));
  for (const Channel& side : sides) take(side, 15);
  take(busy, 15);

  const auto play = [&](const std::string& name, const Plan& plan) {
    turns->word.store(0);
    turns->stop.store(false);
    Message message{'p',
                    {static_cast<double>(static_cast<int>(plan.wait)), plan.spin ? 1.0 : 0.0,
                     plan.kernel, plan.seconds}};
    for (const Channel& side : sides) side.send(message);
    const Message reply = take(sides[0], plan.seconds + 10);
    take(sides[1], 10);
    report.add(name + ", a hop", 1e6 * reply.value[0] / 2, "us");
    report.add(name + ", a hop, 90 % of them", 1e6 * reply.value[1] / 2, "us");
  };
  const char* const waits[] = {"", "cuEventSynchronize (blocking)", "cuEventSynchronize",
                               "cuEventQuery", "cuStreamSynchronize"};
  play("no kernel, futex", {Wait::kNone, false, 0, 0.2});
  play("no kernel, spinning", {Wait::kNone, true, 0, 0.2});
  for (const double kernel : {5e-6, 50e-6}) {
    const std::string size = format("kernel of %.0f us", kernel * 1e6);
    for (int wait = 1; wait < static_cast<int>(Wait::kEnd); ++wait)
      play("alone, " + size + ", " + waits[wait] + ", futex",
           {static_cast<Wait>(wait), false, kernel, 0.25});
    play("alone, " + size + ", cuEventSynchronize, spinning on the word",
         {Wait::kEvent, true, kernel, 0.25});
  }
  for (const double other : {100e-6, 5e-3}) {
    Message message{'b', {other}};
    busy.send(message);
    take(busy, 10);
    sleep_for(0.05);
    for (const double kernel : {5e-6, 50e-6})
      for (const Wait wait : {Wait::kBlockingEvent, Wait::kEvent})
        play(format("beside kernels of %.1f ms, kernel of %.0f us, ", other * 1e3, kernel * 1e6) +
                 waits[static_cast<int>(wait)] + ", futex",
             {wait, false, kernel, 0.6});
    message.value[0] = 0;
    busy.send(message);
    take(busy, 10);
  }
  busy.send({'q'});
  for (const Channel& side : sides) side.send({'q'});
  for (const pid_t child : children) finish(child, 5);
}

}  // namespace probe

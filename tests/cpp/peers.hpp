// What the stress tests of calls share: the memory of one peer, and the bell that all ring.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>

#include "flatweights/doorbell.hpp"
#include "flatweights/layout.hpp"
#include "flatweights/mailbox.hpp"
#include "flatweights/memory_file.hpp"

inline constexpr std::size_t kNumbers = 304;  // of a model

inline std::atomic<bool> failed{false};

inline void expect(bool is_so, const char* what) {
  if (is_so) return;
  std::fprintf(stderr, "%s\n", what);
  failed = true;
}

// Of a model of float64.
inline flatweights::Layout layout_of_model() {
  flatweights::Slot slot;
  slot.shape = {kNumbers};
  slot.dtype = flatweights::DType::kFloat64;
  slot.itemsize = sizeof(double);
  return flatweights::Layout({slot});
}

struct Bell {
  std::unique_ptr<flatweights::Doorbell> door = std::make_unique<flatweights::Doorbell>();
  int bell = eventfd(0, EFD_NONBLOCK);
  int poll = epoll_create1(0);

  Bell() {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = bell;
    expect(epoll_ctl(poll, EPOLL_CTL_ADD, bell, &event) == 0, "cannot poll");
  }
  void ring() const {
    const std::uint64_t one = 1;
    expect(write(bell, &one, sizeof one) > 0, "cannot ring");
  }
  void count_down() const {
    if (door->count_down()) ring();
  }
};

struct Peer {
  std::unique_ptr<flatweights::Mailbox> box = std::make_unique<flatweights::Mailbox>();
  std::shared_ptr<flatweights::MemoryFile> segment =
      flatweights::MemoryFile::create(kNumbers * sizeof(double));

  double* numbers() const { return reinterpret_cast<double*>(segment->data()); }
  // Waits for the next command.
  void take() const {
    using Clock = std::chrono::steady_clock;
    const std::chrono::milliseconds most(100);
    do box->enter(1);
    while (box->await(Clock::now() + most, 1) != flatweights::Mailbox::Awaited::kTaken);
  }
};

// Stresses repeated calls: one coordinator and several members, as threads under ThreadSanitizer.
//
// Each model consists of the number of the call and the rank, so a mean shows whether a segment was
// read or written out of turn. Another thread stops the coordinator at random; it goes on at once.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "flatweights/repeated_calls.hpp"
#include "flatweights/repeated_request.hpp"
#include "peers.hpp"

namespace {

using namespace flatweights;

constexpr std::size_t kMembers = 3;
constexpr std::int64_t kCalls = 20000;
constexpr std::uint64_t kCall = 7;

void be_member(std::size_t rank, const Peer& member, const Bell& bell,
               std::span<const std::shared_ptr<MemoryFile>> results) {
  Mailbox& box = *member.box;
  const RepeatedRequest request{kCall, Extent{0, 1, 0, kNumbers * sizeof(double)}};
  member.take();
  for (std::int64_t number = 1; number <= kCalls; ++number) {
    std::fill_n(member.numbers(), kNumbers,
                static_cast<double>(number) + static_cast<double>(rank));
    expect(request.may_ask(box), "the member may not ask");
    request.ask(box, 1.0);
    bell.count_down();
    member.take();
    const auto told = told_again(box);
    expect(told && told->told.number == number, "a response has another number");
    if (!told) return;
    const Extent extent = told->extent;
    const auto* const mean = reinterpret_cast<const double*>(results[extent.segment]->data());
    const bool is_right = std::all_of(mean, mean + kNumbers, [number](double value) {
      return value == static_cast<double>(number) + (kMembers - 1) / 2.0;
    });
    expect(is_right, "a mean is wrong");
    box.drop_hold(Mailbox::Side::kWorker, extent.segment);
  }
}

}  // namespace

int main() {
  Bell bell;
  std::vector<Peer> members(kMembers);
  std::vector<Mailbox*> boxes;
  for (const Peer& member : members) boxes.push_back(member.box.get());
  std::vector<std::shared_ptr<MemoryFile>> results;
  for (int k = 0; k < 2; ++k) results.push_back(MemoryFile::create(kNumbers * sizeof(double)));

  RepeatedCalls calls(boxes);
  RepeatedCalls::Prepared prepared{kCall, layout_of_model(), {}, false, {}, {}};
  prepared.timeouts.assign(kMembers, 30.0);
  for (std::uint32_t k = 0; k < 2; ++k)
    prepared.results[k] = {results[k]->data(), {k, 1, 0, prepared.layout.nbytes()}};
  for (std::size_t k = 0; k < kMembers; ++k) calls.know(k, {{0, 1, members[k].segment}});
  calls.prepare(std::move(prepared));

  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < kMembers; ++rank)
    threads.emplace_back(be_member, rank, std::cref(members[rank]), std::cref(bell),
                         std::span<const std::shared_ptr<MemoryFile>>(results));
  std::atomic<bool> queued{false}, is_over{false};
  threads.emplace_back([&] {
    while (!is_over) {
      queued = true;
      bell.ring();
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  });
  for (Mailbox* const box : boxes) box->post({}, 0);
  const Sleep sleep{bell.door.get(), bell.bell, bell.poll};
  std::vector<double> seen(kMembers, 0.0);
  for (std::int64_t number = 0; number < kCalls;) {
    const RepeatedCalls::Ended ended = calls.run(number, 10.0, sleep, queued, seen);
    expect(ended == RepeatedCalls::Ended::kQueue || number + calls.count() == kCalls,
           "a series has ended without queued");
    if (failed) return 1;
    queued = false;
    number += calls.count();
    seen.assign(calls.seen().begin(), calls.seen().end());
  }
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  return failed ? 1 : 0;
}

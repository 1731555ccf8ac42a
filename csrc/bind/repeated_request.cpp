#include "repeated_request.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <exception>
#include <stdexcept>

#include "flatweights/flatten.hpp"

namespace flatweights::bind {

namespace py = pybind11;

namespace {

constexpr std::uint32_t kStay = RepeatedRequest::kStay;

// The response comes once the last member has asked, so a member waits for as long as their steps
// differ. It polls only with a small model: the average of a large one takes all processors, which
// a poll would delay.
constexpr double kPolled = 1e-3;                        // seconds
constexpr std::size_t kSmall = std::size_t{128} << 10;  // bytes

double polled(std::size_t nbytes) { return nbytes <= kSmall ? kPolled : 0.0; }

void ask(const BoundMailbox& mailbox, const BoundDoorbell& bell, const RepeatedRequest& request,
         double weight) {
  request.ask(mailbox.box(), weight);
  if (bell.door().count_down()) bell.ring_bell();
}

// The copies between tensors and a packed buffer; nothing, if they do not suit the layout.
template <class Copying>
std::optional<std::vector<Copy>> copies(const Layout& layout, const CalledTensor* tensors,
                                        std::size_t count, Copying copying) {
  const std::vector<Slot>& slots = layout.slots();
  if (count != slots.size()) return {};
  std::vector<Copy> made;
  made.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    if (tensors[i].stream != nullptr || tensors[i].size != slots[i].size) return {};
    if (slots[i].size != 0) made.push_back(copying(tensors[i], slots[i]));
  }
  return made;
}

}  // namespace

RepeatedStep::RepeatedStep(Parts parts)
    : parts_(std::move(parts)), polling_(polled(parts_.layout.nbytes())) {}

bool RepeatedStep::ask(const CalledTensor* tensors, std::size_t count) noexcept {
  if (process_ != getpid() || !parts_.request.may_ask(parts_.mailbox.box())) return false;
  try {
    const auto gathered =
        copies(parts_.layout, tensors, count, [this](const CalledTensor& tensor, const Slot& slot) {
          const auto* const from = static_cast<const std::byte*>(tensor.input);
          return Copy{parts_.memory + slot.offset, from, slot.size, slot.itemsize};
        });
    if (!gathered) return false;
    copy_all(*gathered);
  } catch (const std::exception&) {  // memory is short
    return false;
  }
  bind::ask(parts_.mailbox, *parts_.bell, parts_.request, parts_.weight);
  asked_ = seconds_now();
  return true;
}

RepeatedStep::Ended RepeatedStep::wait(const CalledTensor* tensors, std::size_t count,
                                       double seconds) noexcept {
  Mailbox& box = parts_.mailbox.box();
  box.enter(kStay);
  const auto end = in_seconds(seconds);
  // Since it asked: a long wait is made in two parts.
  const auto watched = in_seconds(std::max(0.0, asked_ + polling_.seconds() - seconds_now()));
  Mailbox::Awaited awaited;
  do awaited = box.await(end, kStay, watched);
  while (awaited == Mailbox::Awaited::kInterrupted);
  if (awaited != Mailbox::Awaited::kTaken) return Ended::kAsked;
  polling_.note(seconds_now() - asked_);
  try {
    const auto told = told_again(box);
    const std::byte* const mean =
        told ? memory_of(told->extent, parts_.layout.nbytes(), parts_.theirs) : nullptr;
    if (mean == nullptr) return Ended::kTold;
    const auto scattered =
        copies(parts_.layout, tensors, count, [mean](const CalledTensor& tensor, const Slot& slot) {
          auto* const to = static_cast<std::byte*>(tensor.output);
          return Copy{to, mean + slot.offset, slot.size, slot.itemsize};
        });
    copy_all(*scattered);
    box.drop_hold(Side::kWorker, told->extent.segment);
    return Ended::kDone;
  } catch (const std::exception&) {
    return Ended::kTold;
  }
}

BoundRepeatedRequest::BoundRepeatedRequest(BoundMailbox mailbox,
                                           std::shared_ptr<BoundDoorbell> bell, py::dict segments,
                                           std::uint64_t call, std::size_t size,
                                           const std::optional<Position>& extent,
                                           std::shared_ptr<Segment> segment)
    : mailbox_(std::move(mailbox)),
      bell_(std::move(bell)),
      segments_(std::move(segments)),
      request_{call, {}},
      polling_(polled(size)),
      segment_(std::move(segment)) {
  if (!extent) return;
  const auto [index, generation, offset, nbytes] = *extent;
  check_index(index);
  if (segment_ == nullptr || offset > segment_->file().size() ||
      nbytes > segment_->file().size() - offset)
    throw py::value_error("extent: expected one in the segment");
  request_.extent = Extent{index, generation, offset, nbytes};
}

py::object BoundRepeatedRequest::exchange(double weight, double seconds) {
  Mailbox& box = mailbox_.box();
  if (box.state() != Mailbox::State::kBusy) throw std::runtime_error("mailbox: no command");
  if (!request_.may_ask(box)) return py::none();
  ask(mailbox_, *bell_, request_, weight);
  box.enter(kStay);
  const double begin = seconds_now();
  const bool has_come = mailbox_.await(seconds, kStay, polling_.seconds());
  polling_.note(seconds_now() - begin);
  if (!has_come) return py::bool_(false);
  const auto told = told_again(box);
  if (!told) return py::bool_(true);
  const auto& [index, generation, offset, nbytes] = told->extent;
  if (!segments_.contains(py::int_(index))) return py::bool_(true);
  const auto [known, segment] =
      py::cast<std::pair<std::uint32_t, PeerSegment>>(segments_[py::int_(index)]);
  if (known != generation) return py::bool_(true);
  return py::make_tuple(told->told.number, told->told.waited, told->told.averaged,
                        segment.view(mailbox_, true, index, offset, nbytes));
}

std::shared_ptr<RepeatedStep> BoundRepeatedRequest::step(const BoundLayout& bound, double weight,
                                                         double seconds) const {
  if (!request_.extent || request_.extent->nbytes != bound.layout.nbytes()) return nullptr;
  return std::make_shared<RepeatedStep>(RepeatedStep::Parts{
      mailbox_, bell_, request_, segment_->file().data() + request_.extent->offset, segment_,
      known_segments(segments_), bound.layout, weight, seconds});
}

}  // namespace flatweights::bind

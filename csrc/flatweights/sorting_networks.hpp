// The smallest known sorting networks for 2 to 16 numbers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flatweights {

inline constexpr std::size_t kMostInputs = 16;

// Orders two rows, or registers: afterwards `low` holds the smaller number and `high` the larger.
struct Comparator {
  std::uint16_t low;
  std::uint16_t high;
};

// The networks by their number of inputs. Two hexadecimal digits name the inputs of a comparator.
// Sizes and networks are those that B. Dobbelaere's list of sorting networks gives: up to 12 inputs
// no network is smaller (Codish et al., "Sorting nine inputs requires twenty-five comparisons",
// 2016; Harder, "An answer to the Bose-Nelson sorting problem for 11 and 12 channels", 2019).
inline constexpr const char* kNetworks[kMostInputs + 1] = {
    "",
    "",
    "01",                                                                              // 2: 1
    "020112",                                                                          // 3: 3
    "0213012312",                                                                      // 4: 5
    "031402130124123423",                                                              // 5: 9
    "051324123403250123451234",                                                        // 6: 12
    "06234502143601253412462345123456",                                                // 7: 16
    "02134657041526370123456724351436123456",                                          // 8: 19
    "03172548072438560213457814365701243568234567123456",                              // 9: 25
    "0819273546021458790324576901368915234867123546782345673456",                      // 10: 29
    "091624375801354a69781325478a0412375968012645789a2436578912345678234567",          // 11: 35
    "0817263b4a590125346978ab02165a9b031246578b9a1435687a1325698a234567894657345678",  // 12: 39
    "0c1a29375b6816234b798a041236789abc46598bac0538476b9a01256978ab1324569a123457682345678934"
    "56",  // 13: 45
    "0123456789abcd02134859acbd041237586a9dbc0615394a7d8c2a3b467913285b67ac1426357b8a9c243658"
    "7a9b3456789a67",  // 14: 51
    "123a4e586d7c9b0e15283769acbd0716294a5b8dce0624357b8a9cde0312475968abcd01234679acbd12358a"
    "bc3456789a23456789ab5678",  // 15: 56
    "0d1c2f3e48567b9a051729346d8eafbc0123456879abcdef02134a5b6789cedf123c46578a9bde1426587a9d"
    "be24369cbd356879ac3456789abc6789",  // 16: 60
};

constexpr std::uint16_t input_of(char digit) noexcept {
  return static_cast<std::uint16_t>(digit <= '9' ? digit - '0' : digit - 'a' + 10);
}

// Comparator `i` of the network for `inputs` numbers.
constexpr Comparator comparator_of(std::size_t inputs, std::size_t i) noexcept {
  return {input_of(kNetworks[inputs][2 * i]), input_of(kNetworks[inputs][2 * i + 1])};
}

// Comparators of that network.
constexpr std::size_t network_size(std::size_t inputs) noexcept {
  std::size_t digits = 0;
  while (kNetworks[inputs][digits] != 0) ++digits;
  return digits / 2;
}

}  // namespace flatweights

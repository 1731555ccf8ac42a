// Numbers that users set in the environment.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace flatweights {

// Returns the variable's value; nothing if it is not set, or empty. Throws
// std::invalid_argument if it is not a number.
[[nodiscard]] inline std::optional<std::size_t> bytes_from_environment(const char* name) {
  const char* const text = std::getenv(name);
  if (text == nullptr || *text == 0) return std::nullopt;
  const std::string_view digits(text);
  const char* const end = digits.data() + digits.size();
  std::size_t nbytes = 0;
  const auto [rest, error] = std::from_chars(digits.data(), end, nbytes);
  if (error != std::errc() || rest != end)
    throw std::invalid_argument(std::string(name) + ": expected a number of bytes, got '" +
                                std::string(digits) + "'");
  return nbytes;
}

}  // namespace flatweights

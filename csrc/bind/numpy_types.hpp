// NumPy's type numbers, and a flag, which its C interface promises not to change.
#pragma once

namespace flatweights::bind {

inline constexpr int kNumPyBool = 0;
inline constexpr int kNumPyLastInteger = 10;
inline constexpr int kNumPyFloat32 = 11;
inline constexpr int kNumPyFloat64 = 12;
inline constexpr int kNumPyLongDouble = 13;
inline constexpr int kNumPyComplex64 = 14;
inline constexpr int kNumPyComplex128 = 15;
inline constexpr int kNumPyFloat16 = 23;
inline constexpr int kNumPyFirstUser = 256;  // of types that other libraries register

// Flag of a dtype whose elements own other memory: Python objects, or strings of any length.
inline constexpr unsigned kNumPyHasObjects = 1;

}  // namespace flatweights::bind

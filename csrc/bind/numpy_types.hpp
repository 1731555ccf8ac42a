// NumPy's type numbers, which its C interface promises not to change.
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

}  // namespace flatweights::bind

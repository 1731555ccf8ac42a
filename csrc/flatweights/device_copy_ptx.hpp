// What nvcc makes of device_copy.cu, for any GPU: the driver compiles it for the one that is there.
#pragma once

namespace flatweights {

// The version and target are the oldest that have all of these instructions, so that old drivers
// take it: nvcc writes its own.
inline constexpr char kDeviceCopyPtx[] = R"(
.version 6.0
.target sm_50
.address_size 64
.visible .entry flatweights_copy(
  .param .u64 flatweights_copy_param_0
)
{
  .reg .pred   %p<9>;
  .reg .b16   %rs<2>;
  .reg .b32   %r<17>;
  .reg .b64   %rd<42>;
  ld.param.u64   %rd22, [flatweights_copy_param_0];
  cvta.to.global.u64   %rd23, %rd22;
  mov.u32   %r1, %ctaid.x;
  mul.wide.u32   %rd24, %r1, 24;
  add.s64   %rd25, %rd23, %rd24;
  ld.global.u64   %rd1, [%rd25+16];
  ld.global.u64   %rd2, [%rd25];
  ld.global.u64   %rd3, [%rd25+8];
  or.b64    %rd4, %rd3, %rd2;
  and.b64    %rd26, %rd4, 15;
  setp.eq.s64   %p1, %rd26, 0;
  @%p1 bra   $L__BB0_7;
  and.b64    %rd27, %rd4, 3;
  setp.eq.s64   %p2, %rd27, 0;
  @%p2 bra   $L__BB0_3;
  mov.u64   %rd40, 0;
  bra.uni   $L__BB0_11;
$L__BB0_7:
  shr.u64   %rd11, %rd1, 4;
  mov.u32   %r5, %tid.x;
  cvt.u64.u32   %rd39, %r5;
  setp.le.u64   %p5, %rd11, %rd39;
  @%p5 bra   $L__BB0_10;
  mov.u32   %r6, %ntid.x;
  cvt.u64.u32   %rd13, %r6;
$L__BB0_9:
  .pragma "nounroll";
  shl.b64   %rd32, %rd39, 4;
  add.s64   %rd33, %rd3, %rd32;
  add.s64   %rd34, %rd2, %rd32;
  ld.v4.u32   {%r7, %r8, %r9, %r10}, [%rd34];
  st.v4.u32   [%rd33], {%r7, %r8, %r9, %r10};
  add.s64   %rd39, %rd39, %rd13;
  setp.lt.u64   %p6, %rd39, %rd11;
  @%p6 bra   $L__BB0_9;
$L__BB0_10:
  and.b64    %rd40, %rd1, -16;
  bra.uni   $L__BB0_11;
$L__BB0_3:
  shr.u64   %rd5, %rd1, 2;
  mov.u32   %r2, %tid.x;
  cvt.u64.u32   %rd38, %r2;
  setp.le.u64   %p3, %rd5, %rd38;
  @%p3 bra   $L__BB0_6;
  mov.u32   %r3, %ntid.x;
  cvt.u64.u32   %rd7, %r3;
$L__BB0_5:
  .pragma "nounroll";
  shl.b64   %rd29, %rd38, 2;
  add.s64   %rd30, %rd2, %rd29;
  ld.u32   %r4, [%rd30];
  add.s64   %rd31, %rd3, %rd29;
  st.u32   [%rd31], %r4;
  add.s64   %rd38, %rd38, %rd7;
  setp.lt.u64   %p4, %rd38, %rd5;
  @%p4 bra   $L__BB0_5;
$L__BB0_6:
  and.b64    %rd40, %rd1, -4;
$L__BB0_11:
  mov.u32   %r15, %tid.x;
  cvt.u64.u32   %rd35, %r15;
  add.s64   %rd41, %rd40, %rd35;
  setp.ge.u64   %p7, %rd41, %rd1;
  @%p7 bra   $L__BB0_14;
  mov.u32   %r16, %ntid.x;
  cvt.u64.u32   %rd19, %r16;
$L__BB0_13:
  .pragma "nounroll";
  add.s64   %rd36, %rd2, %rd41;
  ld.u8   %rs1, [%rd36];
  add.s64   %rd37, %rd3, %rd41;
  st.u8   [%rd37], %rs1;
  add.s64   %rd41, %rd41, %rd19;
  setp.lt.u64   %p8, %rd41, %rd1;
  @%p8 bra   $L__BB0_13;
$L__BB0_14:
  ret;
}
)";

}  // namespace flatweights

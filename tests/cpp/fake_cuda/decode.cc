// The benchmark's kernel, compiled as C++.
#include "decode_kernel.cu"

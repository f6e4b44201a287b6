// SPDX-License-Identifier: Apache-2.0
// The benchmark's kernel, compiled as C++.
#include "decode_kernel.cu"

// SPDX-License-Identifier: Apache-2.0
// The benchmark's decode kernel, compiled as C++.
#include "decode_kernel.cu"

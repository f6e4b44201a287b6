// SPDX-License-Identifier: Apache-2.0
// Stand-in for the header of the CUDA driver API: the few types that csrc/copy uses.
#pragma once

typedef int CUdevice;
typedef struct CUctx_st* CUcontext;
typedef enum cudaError_enum { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 } CUresult;

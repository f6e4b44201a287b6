// SPDX-License-Identifier: Apache-2.0
// Test files whose tests start threads include this header; ThreadSanitizer runs exactly those
// files. A test that starts a thread without it fails (with_threads.cc).
#pragma once

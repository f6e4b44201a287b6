// SPDX-License-Identifier: Apache-2.0
// Included by each test file whose tests begin threads: those files are what ThreadSanitizer runs. A test
// that begins one without it fails (with_threads.cc).
#pragma once

// SPDX-License-Identifier: Apache-2.0
#pragma once

/// Marks what libsyncbn exports; everything else has hidden visibility.
#if defined(_WIN32)
#error "syncbn supports Linux and other ELF or Mach-O platforms only"
#endif
#define SYNCBN_API __attribute__((visibility("default")))
/// Hides one member of an exported class.
#define SYNCBN_LOCAL __attribute__((visibility("hidden")))

// SPDX-License-Identifier: Apache-2.0
#include "fiber.hpp"

#include <cstdint>
#include <cstdlib>
#include <memory>

#if defined(__SANITIZE_ADDRESS__) && __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define SYNCBN_FIBER_SANITIZER 1
#else
#define SYNCBN_FIBER_SANITIZER 0
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace syncbn::emulation {
namespace {

// finalize of float64 keeps integers of 2,000 bits on the stack, and sanitizers add to it.
constexpr std::size_t kStackBytes = SYNCBN_FIBER_SANITIZER != 0 ? 256 << 10 : 64 << 10;

}  // namespace

#if defined(__x86_64__)

// swapcontext would ask the kernel for the signal mask at every switch.
asm(R"(
.text
.type syncbn_switch_stack, @function
syncbn_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void syncbn_switch_stack(void** save, void* load);

struct Context {
  void* stack_pointer = nullptr;
};
static void switch_to(Context& from, Context& to) {
  syncbn_switch_stack(&from.stack_pointer, to.stack_pointer);
}

#else

struct Context {
  ucontext_t context;
};
static void switch_to(Context& from, Context& to) { swapcontext(&from.context, &to.context); }

#endif

struct Fiber::State {
  // Not touched before it is used: many threads need little of it.
  std::unique_ptr<std::byte[]> stack = std::make_unique_for_overwrite<std::byte[]>(kStackBytes);
  Context inside;
  Context outside;
  void (*entry)(void*) = nullptr;
  void* argument = nullptr;
  const void* outer_stack = nullptr;
  std::size_t outer_bytes = 0;

  void enter_sanitizer(void** fake, const void* bottom, std::size_t bytes) {
#if SYNCBN_FIBER_SANITIZER
    __sanitizer_start_switch_fiber(fake, bottom, bytes);
#else
    (void)fake, (void)bottom, (void)bytes;
#endif
  }
  void leave_sanitizer(void* fake, const void** bottom, std::size_t* bytes) {
#if SYNCBN_FIBER_SANITIZER
    __sanitizer_finish_switch_fiber(fake, bottom, bytes);
#else
    (void)fake, (void)bottom, (void)bytes;
#endif
  }
};

namespace {

void* starting = nullptr;  // handed from start() to the first function on the new stack

}  // namespace

Fiber::Fiber() : state_(std::make_unique<State>()) {}
Fiber::~Fiber() = default;

void Fiber::start(void (*entry)(void*), void* argument) {
  State& state = *state_;
  state.entry = entry;
  state.argument = argument;
  void (*const first)() = [] {
    auto* const mine = static_cast<State*>(starting);
    mine->leave_sanitizer(nullptr, &mine->outer_stack, &mine->outer_bytes);
    mine->entry(mine->argument);
    std::abort();  // entry suspends for ever
  };
#if SYNCBN_FIBER_SANITIZER
  // Frames of a fiber that was given up stay marked otherwise.
  __asan_unpoison_memory_region(state.stack.get(), kStackBytes);
#endif
#if defined(__x86_64__)
  auto top =
      reinterpret_cast<std::uintptr_t>(state.stack.get() + kStackBytes) & ~std::uintptr_t{15};
  auto** at = reinterpret_cast<void**>(top);
  *--at = nullptr;  // as if `first` had been called: the stack is aligned after a return address
  *--at = reinterpret_cast<void*>(first);
  for (int saved = 0; saved < 6; ++saved) {
    *--at = nullptr;
  }
  state.inside.stack_pointer = static_cast<void*>(at);
#else
  getcontext(&state.inside.context);
  state.inside.context.uc_stack.ss_sp = state.stack.get();
  state.inside.context.uc_stack.ss_size = kStackBytes;
  makecontext(&state.inside.context, first, 0);
#endif
}

void Fiber::resume() {
  State& state = *state_;
  starting = &state;
  void* fake = nullptr;
  state.enter_sanitizer(&fake, state.stack.get(), kStackBytes);
  switch_to(state.outside, state.inside);
  state.leave_sanitizer(fake, nullptr, nullptr);
}

void Fiber::suspend(bool for_ever) {
  State& state = *state_;
  void* fake = nullptr;
  state.enter_sanitizer(for_ever ? nullptr : &fake, state.outer_stack, state.outer_bytes);
  switch_to(state.inside, state.outside);
  state.leave_sanitizer(fake, &state.outer_stack, &state.outer_bytes);
}

}  // namespace syncbn::emulation

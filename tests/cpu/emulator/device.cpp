// Runs one block of a kernel: see device.h.
#include "device.h"

#include <ucontext.h>

alignas(1024) unsigned char shared[240 * 1024];
Index threadIdx, blockIdx;
Barrier warp_barriers[kMostThreads / 32], block_barriers[16];
int block_threads;
unsigned posted[kMostThreads][8];
std::map<attn::u32, attn::Transactions> attn::mbarriers;

static ucontext_t fibers[kMostThreads], caller;
static bool finished[kMostThreads];
static void (*kernel)();
constexpr size_t kStack = 1 << 18;
static char* stacks[kMostThreads];

void fail(const char* what) {
  fprintf(stderr, "block %d, thread %d: %s\n", blockIdx.x, threadIdx.x, what);
  abort();
}

// A thread that has not finished, of those from `begin` on; -1 where there is none.
static int another(int begin, int count) {
  const int first = rand() % count;
  for (int i = 0; i < count; ++i)
    if (const int next = begin + (first + i) % count; !finished[next]) return next;
  return -1;
}

void give_way(bool to_another_warp) {
  const bool leave = to_another_warp || rand() % 8192 == 0;
  const int me = threadIdx.x, next = leave ? another(0, block_threads) : another(me / 32 * 32, 32);
  if (next < 0 || next == me) return;
  threadIdx.x = next;
  swapcontext(&fibers[me], &fibers[next]);
  threadIdx.x = me;
}

static void fiber(int thread) {
  threadIdx.x = thread;
  kernel();
  finished[thread] = true;
  const int next = another(0, block_threads);
  if (next < 0) setcontext(&caller);
  threadIdx.x = next;
  setcontext(&fibers[next]);
}

void run_block(int threads, int block, void (*body)()) {
  block_threads = threads;
  blockIdx.x = block;
  kernel = body;
  attn::mbarriers.clear();
  for (Barrier& barrier : warp_barriers) barrier = {};
  for (Barrier& barrier : block_barriers) barrier = {};
  memset(shared, 0xff, sizeof shared);
  for (int i = 0; i < threads; ++i) {
    if (!stacks[i]) stacks[i] = static_cast<char*>(malloc(kStack));
    finished[i] = false;
    getcontext(&fibers[i]);
    fibers[i].uc_stack.ss_sp = stacks[i];
    fibers[i].uc_stack.ss_size = kStack;
    makecontext(&fibers[i], reinterpret_cast<void (*)()>(fiber), 1, i);
  }
  threadIdx.x = 0;
  swapcontext(&caller, &fibers[0]);
}

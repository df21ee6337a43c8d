// The C face of the extension, called through ctypes, and the empty Python module that carries it.
#define Py_LIMITED_API 0x030b0000
#include <Python.h>
#include <sys/mman.h>

#include <cstring>
#include <memory>

#include "program.h"
#include "sampling.h"

using namespace quire;

#define EXPORT extern "C" __attribute__((visibility("default")))
#ifndef QUIRE_SOURCES
#define QUIRE_SOURCES ""  // built by hand
#endif

namespace {

const Kernels* by_place(int i) {
  const Kernels* all[] = {kernels_amx(), kernels_avx512(), kernels_avx512bw(), kernels_avx2(),
                          kernels_i8mm(), kernels_neon(), kernels_base()};
  int seen = 0;
  for (const Kernels* k : all)
    if (k && seen++ == i) return k;
  return nullptr;
}

}  // namespace

// Names of the kernel sets this host can run, best first; null past the last.
// A digest of what this was built from, by which a build that has fallen behind its sources is known.
EXPORT const char* quire_sources() { return QUIRE_SOURCES; }

EXPORT const char* quire_isa(int place) {
  const Kernels* k = by_place(place);
  return k ? k->name : nullptr;
}

EXPORT const Kernels* quire_kernels(const char* name) {
  for (int i = 0; const Kernels* k = by_place(i); i++)
    if (!std::strcmp(k->name, name)) return k;
  return nullptr;
}

// How large the structs are that Python fills, in the order of structs.py.
EXPORT size_t quire_struct_bytes(int place) {
  constexpr size_t bytes[] = {
      sizeof(Matrix),     sizeof(Attention), sizeof(Latent),  sizeof(GatedDelta),   sizeof(Mamba2),
      sizeof(ShortConv),  sizeof(Mlp),       sizeof(Experts), sizeof(LayerInput),   sizeof(Layer),
      sizeof(Decoder),    sizeof(AdapterLayer), sizeof(StepGroup), sizeof(Step),  sizeof(Sampling),
  };
  return bytes[place];
}

// Zeroed memory for packed weights, in huge pages where the system gives them.
EXPORT void* quire_reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
#ifdef MADV_HUGEPAGE
  madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return p;
}

EXPORT void quire_release(void* p, size_t bytes) { munmap(p, bytes); }

EXPORT size_t quire_matrix_bytes(int n, int k, int form) {
  Matrix m{nullptr, n, k, FormId(form)};
  return m.group_bytes() * m.groups();
}

EXPORT int quire_pack(int kind, const uint8_t* rows, int first, int count, const Matrix* into) {
  return pack(kind, rows, first, count, *into);
}

EXPORT void quire_scale(const Matrix* m, const float* factors) { scale_rows(*m, factors); }

EXPORT void quire_unpack(const Matrix* from, int row, float* out) { unpack_row(*from, row, out); }

EXPORT Pool* quire_pool(int threads) { return new Pool(threads); }
EXPORT void quire_pool_free(Pool* pool) { delete pool; }

EXPORT Program* quire_program(const Decoder* decoder, const Kernels* kernels, Pool* pool) {
  return new Program(*decoder, *kernels, *pool);
}
EXPORT void quire_program_free(Program* program) { delete program; }
EXPORT int quire_forward(Program* program, const Step* step) { return program->forward(*step); }
EXPORT void quire_logits(Program* program, const float* hidden, int rows, float* out, size_t stride) {
  program->logits(hidden, rows, out, stride);
}

EXPORT void quire_sample(const Kernels* kernels, Pool* pool, const Sampling* rows) { sample(*kernels, *pool, *rows); }
EXPORT void quire_score(const Kernels* kernels, Pool* pool, const float* logits, size_t stride, int vocab, int rows,
                        const int64_t* tokens, int top, int32_t* scores) {
  score_rows(*kernels, *pool, logits, stride, vocab, rows, tokens, top, scores);
}

// A single stage, for tests: out [rows, pad16(n)] = w . quantised(x [rows, k])
EXPORT void quire_linear(const Kernels* kernels, const Matrix* w, const float* x, int rows, float* out) {
  size_t padded = (size_t(rows) + 15) / 16 * 16, blocks = padded * w->blocks();
  std::vector<int8_t> q(padded * w->k);
  std::vector<float> factors(blocks * 3);
  std::vector<int32_t> excess(blocks * 3);
  std::vector<uint8_t> bytes(scratch_bytes(w->k) + 64);
  uint8_t* aligned = bytes.data() + (64 - reinterpret_cast<uintptr_t>(bytes.data()) % 64) % 64;
  Rows quantised{q.data(), factors.data(), excess.data(), w->k};
  kernels->begin();
  for (int r = 0; r < rows; r++) kernels->quantise(x + size_t(r) * w->k, quantised, r);
  const Piece whole{w, 0, w->groups(), {out, size_t(w->groups()) * kLanes, nullptr, false, 0, 0}};
  kernels->gemm(&whole, 1, quantised, 0, rows, {aligned});
  kernels->end();
}

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", "Compiled kernels; called through ctypes.", -1,
                                 nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&definition); }

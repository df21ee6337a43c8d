// Which queries of a step are attended together, worked out once for all layers of a KV group.
// Refuses to know: threads, layers, arithmetic.
#pragma once

#include <vector>

#include "decoder.h"

namespace quire {

struct AttendItem {  // queries [first, first + count) of a plan
  int32_t first, count, shared;
  int64_t cost;
  int32_t asking;      // which of the items that ask for mass, or -1
  int32_t sparse = 0;  // pages that its only query reads; 0: all
};

struct AttendPlan {
  std::vector<Query> queries;
  std::vector<AttendItem> items;  // the most work first
  std::vector<int> asking;        // row of each item that asks for mass

  // `q`: where queries of tokens will be, `stride` apart.
  void make(const Step& step, const StepGroup& group, const float* q, size_t stride);

 private:
  void share(const Step& step, const StepGroup& group, const std::vector<int>& rows, const float* q, size_t stride);
};

// 0, or why a step would read or write where it must not.
int refusal(const Step& step, const Decoder& decoder);

}  // namespace quire

// A matrix in the packed image, or one an expert, as kernels of experts take it.
#pragma once

#include "vec.cuh"
#include "weight_image.cuh"

struct ExpertMatrix {
  const u8* images;         // one behind the other
  const float* row_scales;  // [N] f32 each, of the formats that scale rows
  u64 image_bytes;
  ImageShape shape;
};
static_assert(sizeof(ExpertMatrix) == 48, "ninfer/ops/expert_weights.py mirrors this struct");

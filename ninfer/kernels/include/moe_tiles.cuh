// The list of tiles of sorted pairs that moe_pairs leaves and grouped products take.
#pragma once

constexpr int kTileTokens = 128;  // most sorted positions of a tile; all of one expert

"""Backends: registry chooses one, tiles defines the mathematics of a tile, planning computes the kernels' metadata,
runtime launches them; portable and hopper hold the kernels.

Constants with one meaning in all kernels::

    DECAY_BLOCK     128   tokens per block of the decay prefix
    GRANULE         64    query rows that skip the same keys
    KEY_TILE        128   keys of a work tile of the Hopper kernels, where registers suffice
    WARPGROUP_ROWS  64    rows of a warpgroup's product: query rows in the forward, WARPGROUP_KEYS in the backward
    PART            64    rows and columns of a part of dq
    SPLITS          3     bfloat16 values that add up to a float32; SPLIT_COLUMNS (8) have memory, DEPTH (16) a product
    ROWS, KEYS            rows and keys of a tile (of a schedule)
    TOKENS, WIDTH         rows and columns of a tile that load_tile loads
    PARTIAL               the tile is masked: some of its rows do not see some of its keys; other tiles are full
    COMMON_KEYS           both warpgroups have all keys of a work tile (consume_256.py)
"""

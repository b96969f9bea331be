"""Gluon kernels for sm_90: TMA, WGMMA, warp specialisation."""

"""Kernels in Pallas that know arrays only: `pallas_kernels.kda.kda`, Kimi Delta Attention on TPU (README.md)."""

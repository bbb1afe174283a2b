"""Optimizers of the configuration, and for programs without an engine: Adam, AdamW, Lion and Adagrad over the core's
kernels (fp32, bf16 and fp16 parameters on the CPU), Lamb and Muon over torch's operators."""

from __future__ import annotations

from tessera.optim._alone import Adagrad, Adam, AdamW, FusedAdam, Lion
from tessera.optim._whole import Lamb, Muon

__all__ = ["Adagrad", "Adam", "AdamW", "FusedAdam", "Lamb", "Lion", "Muon"]

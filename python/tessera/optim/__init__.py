"""Optimizers of the configuration, and for programs without an engine: Adam, AdamW, Lion and Adagrad over the core's
kernels (fp32, bf16 and fp16 parameters on the CPU), Lamb, Muon and Adafactor over torch's operators."""

from __future__ import annotations

from tessera.optim._alone import Adagrad, Adam, AdamW, FusedAdam, Lion
from tessera.optim._whole import Adafactor, Lamb, Muon

__all__ = ["Adafactor", "Adagrad", "Adam", "AdamW", "FusedAdam", "Lamb", "Lion", "Muon"]

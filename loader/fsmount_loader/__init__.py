"""Streams a mounted version into distributed PyTorch training: verified, elastic, resumable."""

from fsmount_loader.batch import Batch
from fsmount_loader.dataset import ShardDataset
from fsmount_loader.loader import ShardLoader
from fsmount_loader.metrics import MaskedMean
from fsmount_loader.transform import Generators, per_sample

__all__ = ["Batch", "Generators", "MaskedMean", "ShardDataset", "ShardLoader", "per_sample"]

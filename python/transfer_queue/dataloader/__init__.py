"""A partition as a stream of batches for torch's data loaders."""

from transfer_queue.dataloader._chunking import chunk_batch_fn
from transfer_queue.dataloader.streaming_dataloader import StreamingDataLoader
from transfer_queue.dataloader.streaming_dataset import StreamingDataset, default_fetch_batch_fn

__all__ = ["StreamingDataLoader", "StreamingDataset", "chunk_batch_fn", "default_fetch_batch_fn"]

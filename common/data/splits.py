"""What a protocol's split of a domain must be, and the hashes by which server and devices compare splits."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from common.data.batches import Split
from common.errors import DataError


def check_split(protocol: str, domain: str, client_id: str, indices: object, images: int) -> None:
    """Refuse a split that is not what :meth:`common.data.protocols.Protocol.split` must return.

    Args:
        protocol: the name of the protocol's class.
        domain: the domain's name.
        client_id: the client's.
        indices: what was returned.
        images: number of the domain's training images.

    Raises:
        DataError: it is no int64 tensor [n] of distinct, ascending indices of them.
    """
    fits = False
    if isinstance(indices, Tensor) and indices.dtype == torch.int64 and indices.ndim == 1:
        inside = torch.cat([torch.tensor([-1]), indices, torch.tensor([images])])
        fits = bool((inside.diff() > 0).all())
    if not fits:
        raise DataError(
            f"{protocol}.split of {client_id} must be an int64 tensor [n] of distinct, ascending indices from 0 to "
            f"{images - 1}, of the training images of {domain}; it is {type(indices).__name__} {str(indices)[:80]}"
        )


def split_hash(data_name: str, client_id: str, indices: Tensor, labels: Tensor, *validation: Tensor) -> str:
    """Return the SHA-256 (hex) of one client's samples: the data set's name, the client, its indices, and their labels.

    Args:
        data_name: ``DataSource.name``.
        client_id: the client that holds the samples.
        indices: int64 [n], the training samples, from :meth:`common.data.protocols.Protocol.parts`.
        labels: int64 [N], of the domain's whole train split; those at ``indices`` are hashed.
        validation: int64 [m], the validation samples, if the client has any.
    """
    digest = hashlib.sha256(f"{data_name}\n{client_id}\n{len(indices)}\n".encode())
    for values in (indices, labels.to(indices.device)[indices], *validation):
        digest.update(values.to("cpu", torch.int64).contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def public_split_hash(data_name: str, client_id: str, class_counts: Sequence[int], validation: int) -> str:
    """Return the SHA-256 (hex) of what a private client reveals; indices and labels of samples are not part of it.

    Args:
        data_name: ``DataSource.name``.
        client_id: the client that holds the samples.
        class_counts: training samples per class.
        validation: number of validation samples.
    """
    lines = [data_name, client_id, *map(str, class_counts), str(validation)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def content_hash(split: Split, *further: str) -> str:
    """Return the SHA-256 (hex) of a split's pixels, followed by further texts."""
    digest = hashlib.sha256(split.images.cpu().contiguous().numpy().data)
    digest.update("\n".join(further).encode())
    return digest.hexdigest()

# SPDX-License-Identifier: Apache-2.0
"""What travels from the scheduler to the workers with each job."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .compat import LoadStoreSpec


@dataclass(slots=True, eq=False)
class RowLoadStoreSpec(LoadStoreSpec):
    """Rows of the host region: one per chunk, in the order of the keys, group after group.

    Pickled to every worker in every step, so arrays and numbers only.
    """

    ticket: int  # under which each rank reports the job's result in the region; 0 = nothing to do
    rows: npt.NDArray[np.uint32]  # shape (chunks,): first 4 KiB page of each row, equal in every area
    group_rows: tuple[int, ...]  # rows of each selected group, by position


def no_rows() -> RowLoadStoreSpec:
    """The spec of a job without chunks."""
    return RowLoadStoreSpec(0, np.empty(0, dtype=np.uint32), ())

# SPDX-License-Identifier: Apache-2.0
"""The message from the scheduler to the workers for each job."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .compat import LoadStoreSpec


@dataclass(slots=True, eq=False)
class RowLoadStoreSpec(LoadStoreSpec):
    """Rows of the host region: one per chunk, in the order of the keys, group after group.

    Pickled to every worker in every step, so it holds only arrays and numbers.
    """

    ticket: int  # key of the job's results in the region, from each rank; 0: no work
    rows: npt.NDArray[np.uint32]  # shape (chunks,): first 4 KiB page of each row, equal in every area
    group_rows: tuple[int, ...]  # rows of each selected group, by position


def no_rows() -> RowLoadStoreSpec:
    """Returns the spec of a job without chunks."""
    return RowLoadStoreSpec(0, np.empty(0, dtype=np.uint32), ())

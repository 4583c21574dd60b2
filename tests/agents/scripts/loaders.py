"""Use DataLoader workers with a data set and a collate function that live in __main__."""

import torch
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index * index])


def join(items: list[torch.Tensor]) -> object:
    return torch.cat(items).tolist()


if __name__ == "__main__":
    for method, workers in (("fork", 2), ("spawn", 1)):
        print(
            method,
            list(
                DataLoader(
                    Squares(), batch_size=4, num_workers=workers, collate_fn=join, multiprocessing_context=method
                )
            ),
        )

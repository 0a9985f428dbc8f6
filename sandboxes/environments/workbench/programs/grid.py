"""Grids of whole numbers, a list of rows that are equally long."""

from __future__ import annotations


def transposed(grid: list[list[int]]) -> list[list[int]]:
    """Return the grid with rows and columns exchanged."""
    return [list(column) for column in zip(*grid, strict=True)]


def turned(grid: list[list[int]]) -> list[list[int]]:
    """Return the grid turned by a quarter to the right: its first column becomes the first row, backwards."""
    return [list(row) for row in zip(*grid[::-1], strict=True)]


def neighbours(grid: list[list[int]], row: int, column: int) -> int:
    """Return the sum of the up to eight cells around one cell."""
    total = 0
    for r in range(max(0, row - 1), min(len(grid), row + 2)):
        for c in range(max(0, column - 1), min(len(grid[0]), column + 2)):
            if (r, c) != (row, column):
                total += grid[r][c]
    return total


def peaks(grid: list[list[int]]) -> list[list[int]]:
    """Return [row, column] of each cell that is the largest of its row and the smallest of its column."""
    found = []
    for r, row in enumerate(grid):
        for c, value in enumerate(row):
            if value == max(row) and value == min(line[c] for line in grid):
                found.append([r, c])
    return found

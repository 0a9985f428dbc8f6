"""One SQLite file shared by the trajectory log and the run registry: its tables, its single writer. Imports core."""

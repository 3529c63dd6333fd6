"""What backs the claims: tasks, tiny models trained to solve them, evaluation, hit rates and traces."""

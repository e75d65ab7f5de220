"""Which chips stand in which machines, asked of the machines themselves or of Slurm."""

"""Programs that show a run: TensorBoard, wandb, trackio."""

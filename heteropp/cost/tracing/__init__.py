"""What a stage computes, holds and sends, found by running its module on meta tensors."""

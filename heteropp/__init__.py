"""Plans and trains one model on chips of several vendors (HeteroPP and HeteroAuto)."""

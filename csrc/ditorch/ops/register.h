#pragma once

namespace ditorch {

// Teaches torch's dispatcher every operator of the device. Called once a vendor is loaded, never
// at load time: a process whose device is another plugin's must keep its PrivateUse1 key.
void register_operators();

// Lists of casts under autocast for the device, the same as CUDA's.
void register_autocast();

}  // namespace ditorch

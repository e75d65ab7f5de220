// Computations of a vendor's one after another, of which the first that fails is the last.
#pragma once

#include "abi/runtime.h"

namespace ditorch {

// The last computation's status, once one of them has failed that of the first that did.
class Status {
 public:
  template <class Compute>
  Status& then(Compute compute) {
    if (status_ == DITORCH_OK) status_ = compute();
    return *this;
  }
  ditorch_status get() const { return status_; }

 private:
  ditorch_status status_ = DITORCH_OK;
};

}  // namespace ditorch

// Dtypes that an adopted device lacks: what its tensors are made of instead.
#pragma once

#include <c10/core/ScalarType.h>

#include <map>
#include <string>

namespace ditorch {

// From now on a tensor of dtype `first` on a device of `device_type` is made as one of `second`,
// which warns once. Devices that lack nothing are never touched. Call it once.
void substitute_dtypes(const std::string& device_type,
                       const std::map<c10::ScalarType, c10::ScalarType>& substitutes);

// From now on making a tensor of dtype `first` there is an error that advises `second`.
void refuse_dtypes(const std::string& device_type,
                   const std::map<c10::ScalarType, c10::ScalarType>& refused);

}  // namespace ditorch

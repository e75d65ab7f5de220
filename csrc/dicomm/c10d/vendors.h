// Who is of which vendor in a group of several.
#pragma once

#include <vector>

namespace dicomm {

// As seen by one rank. The same on every rank but for `mine` and `index`.
struct Vendors {
  std::vector<std::vector<int>> members;  // group ranks, ascending; vendors by their first rank
  std::vector<int> vendor_of;             // by group rank
  int mine = 0;
  int index = 0;  // of this rank among its vendor's

  // vendor_of: equal numbers for ranks of one vendor.
  Vendors(const std::vector<int>& vendor_of, int rank);

  int count() const { return static_cast<int>(members.size()); }
  const std::vector<int>& own() const { return members[mine]; }
  int own_size() const { return static_cast<int>(own().size()); }
  // The member of `vendor` that stands for group rank `rank` there: itself, if it is of that
  // vendor; else its counterpart, with the ranks of other vendors dealt out evenly.
  int counterpart(int rank, int vendor) const;
  // The group ranks that each member of the own vendor stands for, ascending.
  std::vector<std::vector<int>> represented() const;
  // The place of group rank `rank` among the own vendor's.
  int place(int rank) const;
};

}  // namespace dicomm

#include "vendors.h"

#include <algorithm>
#include <map>

namespace dicomm {

Vendors::Vendors(const std::vector<int>& vendor_of_rank, int rank) {
  std::map<int, int> numbers;
  for (std::size_t r = 0; r < vendor_of_rank.size(); ++r) {
    const int vendor = numbers.emplace(vendor_of_rank[r], count()).first->second;
    if (vendor == count()) members.emplace_back();
    members[vendor].push_back(static_cast<int>(r));
    vendor_of.push_back(vendor);
  }
  mine = vendor_of.at(rank);
  index = static_cast<int>(std::find(own().begin(), own().end(), rank) - own().begin());
}

int Vendors::counterpart(int rank, int vendor) const {
  if (vendor_of[rank] == vendor) return rank;
  int place = 0;  // of the rank among those of other vendors
  for (int r = 0; r < rank; ++r) place += vendor_of[r] != vendor;
  return members[vendor][place % members[vendor].size()];
}

std::vector<std::vector<int>> Vendors::represented() const {
  std::vector<std::vector<int>> ranks(own_size());
  for (int rank = 0; rank < static_cast<int>(vendor_of.size()); ++rank)
    ranks[place(counterpart(rank, mine))].push_back(rank);
  return ranks;
}

int Vendors::place(int rank) const {
  return static_cast<int>(std::find(own().begin(), own().end(), rank) - own().begin());
}

}  // namespace dicomm
